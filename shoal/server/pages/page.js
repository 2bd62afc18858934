"use strict";
// What all pages of the server share: elements out of text, what the browser keeps, the theme, the key.
//
// A page has an element #theme, a dialog #settings with the buttons #open-settings and #close-settings, and in
// it the field #key. What a server sends becomes text nodes: it is never read as HTML.

const $ = id => document.getElementById(id);

/** An element with a class and children; a child that is a string becomes text. */
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", "#" + name);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

function iconButton(name, label, onclick) {
  const button = make("button", "", icon(name));
  return Object.assign(button, {type: "button", ariaLabel: label, title: label, onclick});
}

// What the browser keeps

/** localStorage or sessionStorage; null where the browser forbids it. */
function storage(name) {
  try {
    return window[name];
  } catch {
    return null;
  }
}

/** Keeps a value for the next time that the page is loaded, if the browser lets it. */
function keep(kind, name, value) {
  try {
    window[kind].setItem(name, value);
  } catch { /* Storage is full or forbidden: the value lasts as long as the page. */ }
}

// Asking the server

function headers() {
  const key = $("key").value.trim();
  return {"Content-Type": "application/json", ...(key ? {Authorization: "Bearer " + key} : {})};
}

/** An Error that says what an answer other than 200 says, with its `status` and its `code`. */
async function failure(response) {
  const text = await response.text(), later = response.headers.get("Retry-After");
  let error;
  try {
    error = JSON.parse(text).error;
  } catch {
    error = null;  // a proxy's page, perhaps
  }
  const kind = [response.status, error?.type].filter(Boolean).join(", ");
  const message = error?.message || text.slice(0, 300) || response.statusText;
  const shown = response.status === 401
    ? "The API key is missing or wrong (401). The key goes into Settings."  // not how a program would send it
    : [`${message} (${kind})`, later && `Retry in ${later} s.`].filter(Boolean).join(" ");
  return Object.assign(new Error(shown), {status: response.status, code: error?.code});
}

/** Takes the key that this tab has, and calls `action` when another one is given. */
function followKey(action) {
  $("key").value = storage("sessionStorage")?.getItem("shoal.key") || "";
  $("key").onchange = () => {
    keep("sessionStorage", "shoal.key", $("key").value.trim());
    action();
  };
}

// The theme and the settings

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").ariaLabel = $("theme").title = "Theme: " + (theme || "as the system");
}

$("theme").onclick = () => {
  const next = {"": "light", light: "dark", dark: ""}[document.documentElement.dataset.theme];
  keep("localStorage", "shoal.theme", next);
  showTheme(next);
};
$("open-settings").onclick = () => $("settings").showModal();
$("close-settings").onclick = () => $("settings").close();
$("settings").onclick = event => { if (event.target === $("settings")) $("settings").close(); };

showTheme(storage("localStorage")?.getItem("shoal.theme") || "");
