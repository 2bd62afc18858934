"use strict";
// The conversations, as this browser keeps them (localStorage): one entry each, so that saving one is cheap
// and two tabs do not overwrite each other's.
//
// A conversation is {id, title, changed, model, options, messages}: `changed` in milliseconds since 1970,
// `options` the fields of the settings. A message is {role, content}; a question may have files, each
// {name, text}; an answer has reasoning and may have figures and an error.

const ENTRY = "shoal.chat.", MOST_CONVERSATIONS = 100;

/** A conversation without messages, with an id of its own if none is given. */
function newConversation(id, model) {
  const now = Date.now(), unique = now.toString(36) + Math.random().toString(36).slice(2, 8);
  return {id: id || unique, title: "", changed: now, model, options: {}, messages: []};
}

/** All conversations that are kept, the latest first. */
function storedConversations() {
  const entries = Object.keys(storage("localStorage") || {}).filter(name => name.startsWith(ENTRY));
  return entries.map(storedConversation).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

function storedConversation(entry) {
  try {
    const conversation = JSON.parse(localStorage.getItem(entry));
    return Array.isArray(conversation.messages) ? {...newConversation(), ...conversation} : null;
  } catch {
    return null;  // somebody else's entry, or one that was cut off
  }
}

/** Keeps a conversation. Raises what the browser raises when its storage is full or switched off. */
function storeConversation(conversation) {
  localStorage.setItem(ENTRY + conversation.id, JSON.stringify(conversation));
}

function forgetConversation(conversation) {
  storage("localStorage")?.removeItem(ENTRY + conversation.id);
}

/** A name for a conversation: how its first question begins, or its first file. */
function titleOf({content, files = []}) {
  const line = content.trim().split("\n")[0] || files[0]?.name || "Conversation";
  return line.length > 60 ? line.slice(0, 59).trimEnd() + "…" : line;
}
