"use strict";
// The turns of the conversation that is shown: questions and answers with their buttons and versions.

const turns = new WeakMap();  // message -> its element, whose method update() shows the message as it is now

/** Shows the turns of the current conversation. Elements that are there already stay. */
function showTurns() {
  const path = pathOf(current), wanted = path.map(turnOf), dropped = droppedLine(path);
  if (dropped) wanted.splice(dropped.index, 0, dropped.line);
  wanted.forEach((element, i) => {
    if (log.children[i] !== element) log.insertBefore(element, log.children[i] || null);
  });
  while (log.children.length > wanted.length) log.lastElementChild.remove();
  for (const message of path) turnOf(message).update();
  showState();
}

function turnOf(message) {
  if (!turns.has(message)) {
    const turn = make("article", "turn " + message.role), isQuestion = message.role === "user";
    turn.ariaLabel = isQuestion ? "You" : "Answer";
    const versions = versionSwitch(message), fill = isQuestion ? fillQuestion : fillAnswer;
    const update = fill(turn, message, versions);
    turn.update = () => {
      update();
      versions.update();
    };
    turns.set(message, turn);
  }
  return turns.get(message);
}

/** The line that says which turns the model was not sent, and the place where it stands; null if it got all. */
function droppedLine(path) {
  const answer = path.findLast(({role}) => role === "assistant");
  const index = answer?.first ? path.findIndex(({id}) => id === answer.first) : 0;
  if (index <= 0) return null;
  const count = path.slice(0, index).filter(({role}) => role === "user").length;
  const [what, it] = count === 1 ? ["The turn above no longer fits", "it"]
    : [`The ${count} turns above no longer fit`, "them"];
  const line = make("p", "dropped", `${what} the model's context; the model does not see ${it}.`);
  return {index, line};
}

/** "2/3" between two arrows that show the other versions of a message. */
function versionSwitch(message) {
  const count = make("span", "count"), arrows = [["left", "Earlier version", -1], ["right", "Later version", 1]];
  const move = step => {
    const versions = versionsOf(current, message);
    showVersion(current, versions[versions.indexOf(message) + step]);
    cancelEditing();
    showTurns();
    if (conversations.includes(current)) store(current);
  };
  const [earlier, later] = arrows.map(([name, label, step]) => iconButton(name, label, () => move(step)));
  const element = make("div", "versions act", earlier, count, later);
  element.update = () => {
    const versions = versionsOf(current, message), at = versions.indexOf(message);
    element.hidden = versions.length < 2;
    count.textContent = `${at + 1}/${versions.length}`;
    earlier.disabled = at === 0;
    later.disabled = at === versions.length - 1;
  };
  return element;
}

function action(label, name, onclick) {
  return Object.assign(make("button", "act", label), {type: "button", ariaLabel: name, onclick});
}

function fillQuestion(turn, message, versions) {
  const edit = action("Edit", "Edit this question", () => beginEditing(message));
  const body = make("div", "body", message.content);
  body.hidden = !message.content;
  turn.append(...(message.files || []).map(fileView), body, make("div", "foot", versions, edit));
  return () => {};
}

function fileView({name, text}) {
  return make("details", "file", make("summary", "", name, sizeOf(text)), make("pre", "", text));
}

function sizeOf(text) {
  return make("span", "size", size(new Blob([text]).size));
}

function fillAnswer(turn, message, versions) {
  const thoughts = document.createTextNode(""), summary = make("summary"), body = make("div", "body");
  const thought = make("details", "thought", summary, make("div", "", thoughts));
  const error = make("div", "error"), figures = make("span", "figures");
  const copyAnswer = copyButton(() => message.content, "Copy the answer");
  const edit = action("Edit", "Edit this answer", () => beginEditing(message));
  const retry = action("Retry", "Retry", () => answer(current, message));
  const proceed = action("Continue", "Continue", () => proceedWith(current, message));
  copyAnswer.classList.add("act");
  error.setAttribute("role", "alert");
  turn.append(thought, body, error, make("div", "foot", figures, versions, copyAnswer, edit, retry, proceed));
  return () => {
    const isLast = current.last === message.id, busy = isLast && running.has(current);
    turn.classList.toggle("busy", busy);
    turn.ariaBusy = busy;
    summary.textContent = busy && !message.content ? "Thinking…" : "Thoughts";
    if (!message.reasoning.startsWith(thoughts.data)) thoughts.data = "";
    thoughts.appendData(message.reasoning.slice(thoughts.length));
    thought.hidden = !message.reasoning;
    showMarkdown(body, message.content);
    error.textContent = message.error || "";
    error.hidden = !message.error;
    figures.textContent = message.figures || "";
    figures.hidden = !message.figures;
    copyAnswer.hidden = edit.hidden = !message.content;
    proceed.hidden = !isLast || !message.content || !["stopped", "length"].includes(message.reason);
  };
}

/** Shows an answer as it is now, and goes on following its end if that was in sight. */
function draw(conversation, message) {
  if (conversation !== current) return;
  turnOf(message).update();
  if (atEnd) scrollToEnd();
}

function scrollToEnd() {
  scroll.scrollTop = scroll.scrollHeight;
}
