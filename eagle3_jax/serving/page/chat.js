// The conversation.

import { answer } from "./api.js";
import { Run } from "./run.js";
import { addPieces, addStep, element, facts, make, say, showLive } from "./view.js";

const history = []; // {role, content}: what the model has been told and has said

export function clearChat() {
  history.length = 0;
  element("log").replaceChildren();
}

// Streams the answer to `prompt` into the log. What was answered before a stop or a break stays.
export async function chat(prompt, request, signal) {
  const log = element("log");
  const asked = make("div", { className: "message user" }, make("div", { className: "text", textContent: prompt }));
  const text = make("div", { className: "text busy" });
  const line = make("p", { className: "facts" });
  const message = make("div", { className: "message" }, text, line);
  message.setAttribute("aria-busy", "true");
  log.append(asked, message);
  message.scrollIntoView({ block: "nearest" });
  element("live-steps").replaceChildren();

  const run = new Run();
  const body = request([...history, { role: "user", content: prompt }]);
  let said = "";
  let note = "";
  try {
    for await (const event of answer(body, signal)) {
      const low = innerHeight + scrollY > document.documentElement.scrollHeight - 80;
      run.take(event, performance.now());
      said += event.text;
      addPieces(text, event.pieces);
      if (event.accepted !== null) addStep(element("live-steps"), event.accepted);
      showLive(run);
      line.textContent = facts(run);
      if (low) message.scrollIntoView({ block: "end" });
    }
    say(`Finished: ${facts(run)}`);
  } catch (error) {
    if (error.name !== "AbortError") note = "broken off";
    else note = "stopped";
    say(note);
    if (!said) {
      [asked, message].forEach((node) => node.remove());
      element("prompt").value ||= prompt;
    }
    if (note === "broken off") throw error;
  } finally {
    text.classList.remove("busy");
    message.removeAttribute("aria-busy");
    if (said) history.push({ role: "user", content: prompt }, { role: "assistant", content: said });
    line.textContent = [facts(run), note].filter(Boolean).join(" · ");
    line.classList.toggle("bad", note === "broken off");
  }
}
