// Draws tokens, the steps of the model and the chart. Text from outside only ever becomes a text node.

export const element = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const shade = (depth) => `d${Math.min(depth, 7)}`;

// Appends the tokens of one step; neighbours that were guessed share one rounded patch, which begins at a word.
export function addPieces(into, pieces) {
  const drawn = pieces.filter(([text]) => text);
  const guessed = (i) => i >= 0 && i < drawn.length && drawn[i][1] > 0;
  drawn.forEach(([text, depth], i) => {
    const names = [shade(depth)];
    if (!guessed(i - 1)) names.push("first");
    if (!guessed(i + 1)) names.push("last");
    const title = depth ? `guessed at depth ${depth}` : "the model's own";
    const word = guessed(i - 1) || !text.trim() ? text : text.trimStart();
    into.append(text.slice(0, text.length - word.length));
    into.append(make("span", { className: names.join(" "), title, textContent: word }));
  });
}

// Adds one column: the model's own token, and the confirmed guesses on top. Keeps what fits.
export function addStep(into, accepted) {
  const column = make("i");
  for (let depth = 0; depth <= accepted; depth++) column.append(make("b", { className: shade(depth) }));
  into.append(column);
  while (into.childElementCount * 7 > Math.max(into.clientWidth, 70)) into.firstElementChild.remove();
}

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Bars of acceptance by depth, with their numbers.
export function drawChart(into, shares) {
  if (!shares.length) {
    into.replaceChildren(make("p", { textContent: "Plain decoding guesses nothing." }));
    return;
  }
  const shown = shares.slice(0, 8);
  const [height, slot] = [64, 264 / Math.max(shown.length, 4)];
  const said = shown.map((share, i) => `depth ${i + 1}: ${Math.round(100 * share)} %`).join(", ");
  const chart = svg("svg", { viewBox: `0 0 264 ${height + 30}`, role: "img", "aria-label": `Guesses right. ${said}` });
  shown.forEach((share, i) => {
    const [middle, tall] = [slot * (i + 0.5), Math.max(height * share, 1)];
    const place = { x: middle - slot * 0.34, y: 14 + height - tall, width: slot * 0.68, height: tall, rx: 2 };
    chart.append(svg("rect", { class: `bar ${shade(i + 1)}`, ...place }));
    const centred = { x: middle, "text-anchor": "middle" };
    chart.append(svg("text", { ...centred, y: 10 + height - tall }, `${Math.round(100 * share)}%`));
    chart.append(svg("text", { ...centred, y: height + 27, class: "axis" }, String(i + 1)));
  });
  chart.append(svg("line", { class: "base", x1: 0, x2: 264, y1: height + 14, y2: height + 14 }));
  into.replaceChildren(chart);
}

const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

export function showLive(run) {
  element("live-speed").textContent = fixed(run?.speed, 1);
  element("live-tau").textContent = fixed(run?.tau, 2);
  element("live-tokens").textContent = run ? String(run.tokens) : "–";
  if (!run) element("live-chart").replaceChildren(make("p", { textContent: "Nothing generated yet." }));
  else drawChart(element("live-chart"), run.acceptance);
}

export function facts(run) {
  const parts = [run.strategy, `${run.tokens} tokens`, `${run.seconds.toFixed(1)} s`];
  if (run.speed !== null) parts.push(`${run.speed.toFixed(1)} tokens/s`);
  if (run.tau !== null) parts.push(`tau ${run.tau.toFixed(2)}`);
  if (run.finish === "length") parts.push("cut at max tokens");
  return parts.filter(Boolean).join(" · ");
}

export const say = (text) => {
  element("status").textContent = text; // read out by screen readers; not seen
};

export function showTrouble(text, again) {
  element("error").hidden = !text;
  element("error-text").textContent = text ?? "";
  element("retry").hidden = !again;
  element("retry").onclick = again ?? null;
}

export function starters(into, use) {
  const prompts = ["Explain how rainbows form.", "Write a short story about a lighthouse.", "List ten facts about the Moon."];
  into.replaceChildren(
    ...prompts.map((text) => make("button", { type: "button", textContent: text, onclick: () => use(text) })),
  );
}
