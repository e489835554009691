// Plain against speculative on one prompt. Each runs alone, so that neither takes the machine from the other; while the
// second runs, the first is played again at the pace it had.

import { answer } from "./api.js";
import { Run } from "./run.js";
import { addPieces, addStep, element, facts, make, showLive } from "./view.js";

class Lane {
  constructor(id, title) {
    this.clock = make("span", { className: "clock", textContent: "0.0 s" });
    this.phase = make("p", { className: "phase" });
    this.text = make("div", { className: "text" });
    this.steps = make("div", { className: "steps" });
    this.box = element(id);
    this.box.classList.remove("winner");
    this.box.replaceChildren(
      make("header", {}, make("h2", { textContent: title }), this.clock),
      this.phase, this.steps, this.text,
    );
  }

  clear(phase) {
    this.text.replaceChildren();
    this.steps.replaceChildren();
    this.clock.textContent = "0.0 s";
    this.phase.textContent = phase;
    this.text.classList.add("busy");
  }

  draw({ pieces, accepted }) {
    addPieces(this.text, pieces);
    if (accepted !== null) addStep(this.steps, accepted);
  }

  finish(run) {
    this.text.classList.remove("busy");
    this.clock.textContent = `${run.seconds.toFixed(1)} s`;
    this.phase.textContent = facts(run);
  }
}

// Streams one answer into a lane. started: called at the first text, when the clock starts.
async function drive(lane, body, signal, started) {
  const run = new Run();
  const ticking = setInterval(() => {
    if (run.first !== null) lane.clock.textContent = `${((performance.now() - run.first) / 1000).toFixed(1)} s`;
  }, 100);
  let said = "";
  element("live-steps").replaceChildren();
  try {
    for await (const event of answer(body, signal)) {
      const waiting = run.first === null;
      run.take(event, performance.now());
      if (waiting && run.first !== null) started();
      said += event.text;
      lane.draw(event);
      if (event.accepted !== null) addStep(element("live-steps"), event.accepted);
      showLive(run);
    }
  } finally {
    clearInterval(ticking);
    lane.finish(run);
  }
  return { run, said };
}

// Plays a finished run again. ended: resolves at its end; stop: shows at once what is left of it.
function replay(lane, run) {
  const begun = performance.now();
  let next = 0;
  let end;
  const ended = new Promise((resolve) => (end = resolve));
  const show = (until) => {
    while (next < run.pieces.length && run.pieces[next].at <= until) lane.draw(run.pieces[next++]);
    if (next < run.pieces.length) return;
    clearInterval(ticking);
    lane.finish(run);
    end();
  };
  const ticking = setInterval(() => {
    const now = performance.now() - begun;
    lane.clock.textContent = `${(now / 1000).toFixed(1)} s`;
    show(now);
  }, 30);
  return { ended, stop: () => show(Infinity) };
}

// ratio: of tokens a second, since texts that differ may differ in length.
function verdict(ratio, plain, spec) {
  const same = plain.said === spec.said
    ? "the same text"
    : "the texts differ: where two tokens are nearly as likely, rounding decides";
  if (!Number.isFinite(ratio) || ratio <= 0) return `Too short to compare; ${same}.`;
  if (ratio >= 1) return `Speculation was ${ratio.toFixed(2)} times as fast; ${same}.`;
  return `Speculation was slower, at ${ratio.toFixed(2)} times the speed of plain decoding; ${same}.`;
}

export function emptyRace(strategy) {
  new Lane("lane-plain", "plain").phase.textContent = "waits";
  new Lane("lane-spec", strategy).phase.textContent = "waits";
  element("verdict").textContent = "";
}

export async function race(prompt, request, strategy, signal) {
  const left = new Lane("lane-plain", "plain");
  const right = new Lane("lane-spec", strategy);
  element("verdict").textContent = "";
  const seed = Math.floor(Math.random() * 2 ** 31); // one for both: they then draw the same tokens
  const body = (name) => ({ ...request([{ role: "user", content: prompt }], name), seed });
  let playing = null;
  let begun = false;
  try {
    left.clear("runs alone");
    right.phase.textContent = "waits for plain to finish";
    const plain = await drive(left, body("plain"), signal, () => {});
    right.clear("runs alone");
    begun = true;
    const spec = await drive(right, body(strategy), signal, () => {
      left.clear("played again");
      playing = replay(left, plain.run);
      signal.addEventListener("abort", playing.stop);
    });
    await playing?.ended;
    const ratio = spec.run.pace / plain.run.pace;
    element(ratio > 1 ? "lane-spec" : "lane-plain").classList.add("winner");
    element("verdict").textContent = verdict(ratio, plain, spec);
    element("verdict").scrollIntoView({ block: "nearest" });
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    element("verdict").textContent = "Stopped.";
    element("prompt").value ||= prompt;
  } finally {
    playing?.stop();
    if (!begun) right.phase.textContent = "not run";
    [left, right].forEach((lane) => lane.text.classList.remove("busy"));
  }
}
