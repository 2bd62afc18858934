"use strict";
// The list of conversations beside the chat: search, titles, deletion.

function showList() {
  if ($("list").querySelector("input")) return;  // a title that is being changed stays; rename() comes back
  const wanted = $("search").value.trim().toLowerCase();
  const rows = conversations.map(conversation => rowOf(conversation, wanted)).filter(Boolean);
  $("list").replaceChildren(...rows);
  $("found").textContent = wanted && !rows.length ? "No conversation has these words." : "";
}

/** The row of a conversation; null if it does not have the words that are wanted. */
function rowOf(conversation, wanted) {
  const place = conversation.title.toLowerCase().includes(wanted) ? "" : snippetOf(conversation, wanted);
  if (place === null) return null;
  const title = make("button", "title", conversation.title);
  if (place) title.append(make("span", "place", place));
  const row = make("li", running.has(conversation) ? "running" : "", title);
  title.title = conversation.title;
  title.onclick = () => open(conversation);
  if (conversation === current) title.ariaCurrent = "page";
  row.append(iconButton("pen", `Rename ${conversation.title}`, () => rename(conversation, row)),
    iconButton("bin", `Delete ${conversation.title}`, () => remove(conversation)));
  return row;
}

/** Where a conversation has the words, with some of what stands around them; null if it does not have them. */
function snippetOf({messages}, wanted) {
  for (const {content} of messages) {
    const at = content.toLowerCase().indexOf(wanted);
    if (at < 0) continue;
    const begin = Math.max(0, at - 16);
    return (begin ? "…" : "") + content.slice(begin, at + 60).replace(/\s+/g, " ");
  }
  return null;
}

/** Turns a row of the list into a field for its title: Enter keeps it, Escape does not. */
function rename(conversation, row) {
  const field = Object.assign(make("input"), {value: conversation.title, ariaLabel: "Title", maxLength: 100});
  const done = keep => {
    field.onblur = null;
    field.remove();
    if (keep && field.value.trim()) {
      conversation.title = field.value.trim();
      store(conversation);
    }
    showList();
  };
  field.onblur = () => done(true);
  field.onkeydown = event => {
    event.stopPropagation();
    if (event.key === "Enter") done(true);
    if (event.key === "Escape") done(false);
  };
  row.replaceChildren(field);
  field.select();
}

function remove(conversation) {
  running.get(conversation)?.abort();
  conversations = conversations.filter(other => other !== conversation);
  forgetConversation(conversation);
  const shown = conversation === current;
  if (shown) open(newConversation("", current.model));
  showList();
  notice(`“${conversation.title}” is deleted.`, {failed: false, label: "Undo", action: () => {
    addConversations([conversation]);
    if (shown) open(conversation);
  }});
  $("notice").lastElementChild.focus();
}

/** Adds and keeps conversations that are not new. */
function addConversations(added) {
  conversations = [...conversations, ...added].sort((a, b) => b.changed - a.changed);
  for (const old of conversations.splice(MOST_CONVERSATIONS)) forgetConversation(old);
  added.filter(conversation => conversations.includes(conversation)).forEach(store);
  showList();
}

$("search").oninput = showList;
$("search").onkeydown = event => {
  if (event.key === "Escape") event.stopPropagation();  // it empties the field, and stops no answer
  if (event.key === "Enter") $("list").querySelector("button")?.click();
};
