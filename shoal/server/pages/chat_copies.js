"use strict";
// Copies of conversations as files: Markdown to read, JSON to bring back. A conversation's JSON is a body for
// /v1/chat/completions, so curl and `shoal chat` take it; all versions are in its field `shoal`.

const FIELDS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty",
  "frequency_penalty", "repetition_penalty"];

function bodyOf(conversation) {
  const {model: name, options} = conversation;
  const {messages, stop, model, ...body} = requestBody(pathOf(conversation), name, options);
  for (const key of ["stream", "stream_options", "add_generation_prompt", "continue_final_message"]) {
    delete body[key];
  }
  const plain = messages.map(({role, content}) => ({role, content}));
  return {model, messages: plain, ...body, ...(stop ? {stop} : {}), shoal: conversation};
}

function markdownOf(conversation) {
  const parts = pathOf(conversation).map(m => `**${m.role === "user" ? "You" : "Answer"}**\n\n${promptOf(m)}`);
  return [`# ${conversation.title}`, ...parts].join("\n\n") + "\n";
}

/** A conversation out of a file's JSON; null if the file has another content. */
function fromBody(body) {
  if (body?.shoal) return readConversation(body.shoal);
  const conversation = readConversation({...body, id: "", options: {}});
  if (!conversation?.messages.length) return null;
  const [first] = body.messages, {options} = conversation;
  if (first?.role === "system" && typeof first.content === "string") options.system = first.content;
  for (const name of FIELDS) if (typeof body[name] === "number") options[name] = String(body[name]);
  const stops = [body.stop].flat().filter(stop => typeof stop === "string");
  if (stops.length) options.stop = stops.join("\n");
  return conversation;
}

function download(name, type, content) {
  const link = make("a"), address = URL.createObjectURL(new Blob([content], {type}));
  Object.assign(link, {href: address, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A file's name out of a title. */
function fileName({title}, ending) {
  return (title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation") + ending;
}

/** Adds the conversations of JSON files. One that is here already gets the messages that it lacks. */
async function bringBack(files) {
  let count = 0, latest = null;
  const refused = [];
  for (const file of files) {
    try {
      const found = [JSON.parse(await file.text())].flat().map(fromBody);
      if (!found.length || found.includes(null)) throw new Error("it holds no conversations");
      for (const conversation of found) {
        const known = conversations.find(({id}) => id === conversation.id);
        if (known) mergeMessages(known, conversation);
        addConversations(known ? [] : [conversation]);
        if (known) store(known);
        latest = known || conversation;
        count++;
      }
    } catch (error) {
      refused.push(`“${file.name}” cannot be imported: ${error.message}.`);
    }
  }
  $("settings").close();
  if (latest) open(latest);
  const imported = count ? [`${count} conversation${count > 1 ? "s are" : " is"} imported.`] : [];
  notice([...imported, ...refused].join(" "), {failed: refused.length > 0});
}

const json = value => JSON.stringify(value, null, 1);
$("export-markdown").onclick = () =>
  download(fileName(current, ".md"), "text/markdown", markdownOf(current));
$("export-json").onclick = () =>
  download(fileName(current, ".json"), "application/json", json(bodyOf(current)));
$("export-all").onclick = () =>
  download("conversations.json", "application/json", json(conversations.map(bodyOf)));
$("import").onclick = () => $("import-file").click();
$("import-file").onchange = async () => {
  await bringBack([...$("import-file").files]);
  $("import-file").value = "";
};
