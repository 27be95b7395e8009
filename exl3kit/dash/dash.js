"use strict";

// Make `old` like `now`, touching only what differs: what has the focus, is selected or was opened stays.
function renew(old, now) {
  if (old.nodeName !== now.nodeName || old.id !== now.id) {
    old.replaceWith(now);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== now.data) old.data = now.data;
    return;
  }
  for (const name of old.getAttributeNames()) {
    if (!now.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const name of now.getAttributeNames()) {
    if (old.getAttribute(name) !== now.getAttribute(name)) old.setAttribute(name, now.getAttribute(name));
  }
  const was = [...old.childNodes];
  const will = [...now.childNodes];
  will.forEach((child, place) => {
    if (place < was.length) renew(was[place], child);
    else old.append(child);
  });
  was.slice(will.length).forEach((child) => child.remove());
}

function say(id, text) {
  const element = document.getElementById(id);
  if (element.textContent !== text) element.textContent = text;
}

let source = null;

function listen() {
  source = new EventSource("events");
  source.onmessage = (event) => {
    const told = JSON.parse(event.data);
    const main = document.getElementById("main");
    const now = main.cloneNode(false);
    now.innerHTML = told.main;
    renew(main, now);
    say("news", told.news);
    say("link", "live");
  };
  source.onerror = () => say("link", "kit dash does not answer; trying again");
}

// A page that nobody sees asks no node.
document.addEventListener("visibilitychange", () => {
  source.close();
  if (document.hidden) say("link", "paused");
  else listen();
});
listen();
