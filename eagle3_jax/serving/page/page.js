// Starts the page: settings, tabs, the composer, and the state of the server.

import { health, keepKey, keptKey, model } from "./api.js";
import { chat, clearChat } from "./chat.js";
import { emptyRace, race } from "./race.js";
import { element, say, showLive, showTrouble, starters } from "./view.js";

const NOTES = {
  auto: "The server chooses, step by step, what is fastest.",
  plain: "One token a step; nothing is guessed.",
  chain: "One line of guesses a step, as many as the depth: chain:3 has three.",
  tree: "Several branches of guesses a step, of which the best that holds is kept: tree:3x4x12 is depth 3, 4 branches, 12 tokens checked.",
};
let served = null; // {id, strategies} of the model
let running = null; // the AbortController of what runs now
let looking = 0; // the timer of the next look at the server
let offered = ""; // the strategies that the fields were set from
let awaited = ""; // the strategy that the empty race names

const number = (id) => element(id).valueAsNumber;
const kind = () => document.querySelector("[name=kind]:checked").value;

function strategy() {
  if (kind() === "chain") return `chain:${number("chain-depth")}`;
  if (kind() === "tree") return `tree:${["tree-depth", "tree-top", "tree-nodes"].map(number).join("x")}`;
  return kind();
}

const hasDraft = () => served?.strategies?.join() !== "plain";

// Plain against plain would be no race.
const rival = () => (kind() === "plain" ? `chain:${number("chain-depth")}` : strategy());

function request(messages, name = strategy()) {
  const system = element("system").value.trim();
  return {
    model: served.id,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    stream: true,
    stream_options: { include_usage: true },
    eagle3: { strategy: name, stats: true },
  };
}

const racing = () => element("tab-race").getAttribute("aria-selected") === "true";

async function go(prompt) {
  const wrong = document.querySelector("#settings input:invalid:not([hidden] *)");
  if (running || !prompt.trim()) return;
  if (wrong) {
    element("settings").open = true;
    wrong.reportValidity();
    return;
  }
  running = new AbortController();
  const { signal } = running;
  showTrouble(null);
  element("prompt").value = "";
  grow();
  busy(true);
  say("Answering");
  try {
    served ??= await model();
    if (racing()) await race(prompt, request, rival(), signal);
    else await chat(prompt, request, signal);
  } catch (error) {
    element("prompt").value ||= prompt; // nothing that was typed is lost
    grow();
    showTrouble(error.message, error.kind === "key" || error.kind === "refused" ? null : () => go(element("prompt").value));
    if (error.kind === "key") {
      element("settings").open = true;
      element("key").focus();
    }
    if (!error.kind) throw error; // a fault of this page
    watch();
  } finally {
    running = null;
    busy(false);
    if (document.activeElement === document.body) element("prompt").focus();
  }
}

function busy(yes) {
  element("send").hidden = yes;
  element("stop").hidden = !yes;
  for (const id of ["tab-chat", "clear"]) element(id).disabled = yes;
  element("tab-race").disabled = yes || !hasDraft();
  element("empty").hidden = yes || element("log").childElementCount > 0;
  element("race-starters").hidden = yes;
}

function grow() {
  const box = element("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function select(tab) {
  for (const id of ["chat", "race"]) {
    const chosen = `tab-${id}` === tab;
    element(`tab-${id}`).setAttribute("aria-selected", String(chosen));
    element(`tab-${id}`).tabIndex = chosen ? 0 : -1;
    element(id).hidden = !chosen;
  }
  element("prompt").placeholder = racing() ? "A prompt for both" : "Ask something";
}

// The fields start at something the server has compiled. Without a draft it can only decode plainly.
function offer(strategies) {
  if (!strategies || strategies.join() === offered) return;
  offered = strategies.join();
  element("tab-race").disabled = Boolean(running) || !hasDraft();
  for (const name of ["chain", "tree"]) {
    const shapes = strategies.filter((strategy) => strategy.startsWith(`${name}:`));
    document.querySelector(`[name=kind][value=${name}]`).disabled = !hasDraft();
    if (!shapes.length) continue;
    const fields = { chain: ["chain-depth"], tree: ["tree-depth", "tree-top", "tree-nodes"] }[name];
    const current = `${name}:${fields.map(number).join("x")}`;
    if (shapes.includes(current)) continue;
    shapes[0].split(":")[1].split("x").forEach((value, i) => (element(fields[i]).value = value));
  }
  shape();
}

function note() {
  const shapes = served?.strategies?.filter((strategy) => strategy.startsWith(`${kind()}:`)) ?? [];
  if (!hasDraft()) return "This server has no draft, so nothing is guessed: one token a step.";
  if (shapes.length) return `${NOTES[kind()]} This server has ${shapes.join(", ")} ready; the first use of another takes longer.`;
  return served && kind() === "tree" ? `${NOTES[kind()]} The first use takes longer.` : NOTES[kind()];
}

function shape() {
  element("kind-note").textContent = note();
  element("chain-shape").hidden = kind() !== "chain";
  element("tree-shape").hidden = kind() !== "tree";
  if (!running && rival() !== awaited) emptyRace((awaited = rival()));
}

const STATES = {
  warming: "the server is starting: it compiles its programs",
  draining: "the server is shutting down",
  stopped: "the server is shutting down",
  dead: "the server has failed",
  gone: "the server does not answer",
};

// Shows whether the server is there, again every few seconds until it is ready.
async function watch() {
  const { state, reason } = await health();
  clearTimeout(looking); // of an earlier call: one look is enough
  element("dot").className = `dot ${state}`;
  if (state !== "ready") {
    element("model").textContent = [STATES[state] ?? state, reason].filter(Boolean).join(": ");
    looking = setTimeout(watch, 3000);
    return;
  }
  try {
    served = await model();
    element("model").textContent = served.id;
    offer(served.strategies);
  } catch (error) {
    element("model").textContent = error.message;
  }
}

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  go(element("prompt").value);
});
element("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  go(element("prompt").value);
});
element("prompt").addEventListener("input", grow);
element("stop").addEventListener("click", () => running?.abort());
addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
element("tabs").addEventListener("click", (event) => event.target.id && select(event.target.id));
element("tabs").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const other = racing() ? "tab-chat" : "tab-race";
  if (running || element(other).disabled) return;
  select(other);
  element(other).focus();
});
element("kinds").addEventListener("change", shape);
element("settings").addEventListener("change", shape);
element("key").value = keptKey();
element("key").addEventListener("change", (event) => {
  keepKey(event.target.value.trim());
  showTrouble(null);
  watch();
});
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  element("key").blur(); // which is a change, if there was one
});
element("clear").addEventListener("click", () => {
  clearChat();
  element("live-steps").replaceChildren();
  showLive(null);
  busy(false);
});

if (matchMedia("(max-width: 60rem)").matches) element("settings").open = false;
starters(element("starters"), go);
starters(element("race-starters"), go);
select("tab-chat");
shape();
showLive(null);
watch();
element("prompt").focus();
