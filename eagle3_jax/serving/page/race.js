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
  const run = new Run(performance.now());
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

// Plays a finished run again; resolves at its end, or when the signal is aborted.
function replay(lane, run, signal) {
  return new Promise((resolve) => {
    const begun = performance.now();
    let next = 0;
    const ticking = setInterval(() => {
      const now = performance.now() - begun;
      while (next < run.pieces.length && (run.pieces[next].at <= now || signal.aborted)) lane.draw(run.pieces[next++]);
      lane.clock.textContent = `${(now / 1000).toFixed(1)} s`;
      if (next < run.pieces.length) return;
      clearInterval(ticking);
      lane.finish(run);
      resolve();
    }, 30);
  });
}

function verdict(plain, spec) {
  const ratio = plain.run.seconds / spec.run.seconds;
  const same = plain.said === spec.said ? "the same text" : "texts differ: rounding decided a near tie, or the draft was sampled";
  if (!Number.isFinite(ratio) || ratio <= 0) return `Too short to compare; ${same}.`;
  const outcome = ratio >= 1 ? `${ratio.toFixed(2)} times as fast` : `slower: ${ratio.toFixed(2)} times the speed`;
  return `Speculation was ${outcome}; ${same}.`;
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
  try {
    left.clear("runs alone");
    right.phase.textContent = "waits for plain to finish";
    const plain = await drive(left, body("plain"), signal, () => {});
    right.clear("runs alone");
    let playing;
    const spec = await drive(right, body(strategy), signal, () => {
      left.clear("played again");
      playing = replay(left, plain.run, signal);
    });
    await playing;
    const text = verdict(plain, spec);
    element(plain.run.seconds > spec.run.seconds ? "lane-spec" : "lane-plain").classList.add("winner");
    element("verdict").textContent = text;
    element("verdict").scrollIntoView({ block: "nearest" });
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    element("verdict").textContent = "Stopped.";
  } finally {
    [left, right].forEach((lane) => lane.text.classList.remove("busy"));
  }
}
