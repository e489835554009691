"""Style sheet of the report, light and dark."""

STYLE = """
:root { --ink: #0b0b0b; --soft: #52514e; --faint: #e4e3df; --page: #fbfaf8; --card: #ffffff;
  --c0: #2a78d6; --c1: #d6541f; --drafted: #bfe3c8;
  --d0: #0d366b; --d1: #1c5cab; --d2: #2a78d6; --d3: #5598e7; --d4: #86b6ef; --d5: #9ec5f4;
  --d6: #b7d3f6; --d7: #cde2fb; }
@media (prefers-color-scheme: dark) { :root { --ink: #f2f1ee; --soft: #b5b3ad; --faint: #3a3936; --page: #161513;
  --card: #1e1d1b; --c0: #5598e7; --c1: #eb7a4b; --drafted: #1f5a33;
  --d0: #cde2fb; --d1: #9ec5f4; --d2: #6da7ec; --d3: #3987e5; --d4: #2a78d6; --d5: #256abf;
  --d6: #1c5cab; --d7: #184f95; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { margin: 0; font-size: 28px; } h2 { margin: 40px 0 12px; font-size: 19px; }
h3, figcaption { margin: 0 0 6px; font-size: 14px; font-weight: 600; }
header p, .note, small { color: var(--soft); } header p { margin: 2px 0 20px; } .note { max-width: 82ch; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; }
.tile { background: var(--card); border: 1px solid var(--faint); border-radius: 8px; padding: 12px 14px; }
.tile span, .tile small { display: block; font-size: 13px; color: var(--soft); }
.tile b { display: block; font-size: 26px; font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 14px; }
figure, .table, article { margin: 0; background: var(--card); border: 1px solid var(--faint); border-radius: 8px;
  padding: 14px 16px; }
svg { width: 100%; height: auto; display: block; } .grid { stroke: var(--faint); stroke-width: 1; }
svg text { font-size: 12px; fill: var(--soft); } svg .end { fill: var(--ink); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .hit { opacity: 0; } .hit:hover { opacity: .35; }
.legend { min-height: 20px; font-size: 13px; color: var(--soft); }
.key { margin-right: 14px; white-space: nowrap; }
.key::before { content: ""; display: inline-block; width: 14px; height: 3px; margin-right: 6px; vertical-align: middle;
  border-radius: 2px; background: var(--colour); }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); gap: 14px;
  align-items: start; }
table { width: 100%; border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); } td, th { padding: 3px 10px 3px 0;
  border-bottom: 1px solid var(--faint); vertical-align: top; }
td { overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; } td:not(:first-child), th:not(:first-child) { text-align: right; }
h2 + .table td:not(:first-child) { text-align: left; } h2 + .table td:first-child { white-space: nowrap; }
.samples { display: grid; gap: 12px; } article p { margin: 6px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.given { color: var(--soft); } .target { color: var(--ink); }
 .drafted { background: var(--drafted); border-radius: 3px; }
details { margin-top: 12px; } pre { background: var(--card); border: 1px solid var(--faint); border-radius: 8px;
  padding: 14px; overflow: auto; font-size: 13px; }
""" + "".join(
    f".{name} {{ --colour: var(--{name}); }} .line.{name} {{ stroke: var(--{name}); }} "
    f"circle.{name} {{ fill: var(--{name}); }}\n"
    for name in ("c0", "c1", *(f"d{i}" for i in range(8)))
)
