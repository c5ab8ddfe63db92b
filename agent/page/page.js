// Renews the page in place, every few seconds while somebody looks at it. What did not change is
// not touched: what is open, focused, selected or scrolled to stays so. Nothing is ever parsed from
// text here: the browser makes the document, in which no script runs.
"use strict";

(() => {
  const PERIOD = 4000; // milliseconds from an answer to the next question
  const PATIENCE = 10000;
  const live = document.getElementById("live");
  const away = document.getElementById("away");
  const icon = document.getElementById("icon");
  const BAD = "%23c0392b"; // as an icon has it
  let timer = 0;
  let asking = null;
  let answered = new Date();

  const same = (old, next) =>
    old.nodeType === next.nodeType && old.nodeName === next.nodeName && (old.id || "") === (next.id || "");

  const renewAttributes = (old, next) => {
    for (const { name, value } of next.attributes) {
      if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const { name } of [...old.attributes]) {
      if (name !== "open" && !next.hasAttribute(name)) old.removeAttribute(name);
    }
  };

  const renew = (old, next) => {
    if (next.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== next.nodeValue) old.nodeValue = next.nodeValue;
      return;
    }
    if (old.isEqualNode(next)) return;
    renewAttributes(old, next);
    renewChildren(old, next);
  };

  const renewChildren = (old, next) => {
    const wanted = new Set([...next.children].map((one) => one.id).filter(Boolean));
    for (const child of [...old.children]) {
      if (child.id && !wanted.has(child.id)) child.remove();
    }
    const known = new Map([...old.children].filter((one) => one.id).map((one) => [one.id, one]));
    let place = old.firstChild;
    for (const child of next.childNodes) {
      const kept = known.get(child.id);
      if (kept && same(kept, child)) {
        if (kept !== place) old.insertBefore(kept, place);
        renew(kept, child);
        place = kept.nextSibling;
      } else if (place && same(place, child)) {
        renew(place, child);
        place = place.nextSibling;
      } else {
        old.insertBefore(document.importNode(child, true), place);
      }
    }
    while (place) {
      const after = place.nextSibling;
      place.remove();
      place = after;
    }
  };

  const take = (page) => {
    if (page.documentElement.dataset.version !== document.documentElement.dataset.version) {
      location.reload(); // another version of the daemon has another page
      return;
    }
    renew(live, page.getElementById("live"));
    renewAttributes(icon, page.getElementById("icon"));
    document.title = page.title;
    answered = new Date();
    away.hidden = true;
    document.body.classList.remove("stale");
  };

  const miss = () => {
    if (away.hidden) {
      const time = answered.toISOString().slice(11, 19);
      away.textContent = `The daemon has not answered since ${time} UTC. This is how things stood then.`;
      away.hidden = false;
      document.body.classList.add("stale");
      document.title = ["No answer", ...document.title.split(" · ").slice(1)].join(" · ");
      icon.setAttribute("href", icon.getAttribute("href").replace(/fill='[^']*'/, `fill='${BAD}'`));
    }
  };

  const ask = () => {
    clearTimeout(timer);
    if (asking || document.hidden) return;
    const request = new XMLHttpRequest();
    asking = request;
    request.open("GET", location.pathname);
    request.setRequestHeader("Accept", "text/html");
    request.responseType = "document";
    request.timeout = PATIENCE;
    request.onloadend = () => {
      asking = null;
      if (document.hidden) return;
      const page = request.status === 200 ? request.response : null;
      if (page && page.getElementById("live")) take(page);
      else miss();
      timer = setTimeout(ask, PERIOD);
    };
    request.send();
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else ask();
  });
  timer = setTimeout(ask, PERIOD);
})();
