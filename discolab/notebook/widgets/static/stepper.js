// A program that is stepped: who stands where, the source, the stack, values; buttons and keys.

const ICONS = {
  step: "M3 4h6v5.2 M6.2 6.6 9 9.6l2.8-3 M4 13.2h10",
  next: "M2.5 9.5C3 4.5 11 3.5 13.2 8.6 M13.8 4.6v4.3H9.6 M5 13.2h6",
  out: "M9 11.2V4.4 M6.2 7 9 4l2.8 3 M4 13.2h10",
  continue: "M5 3.2v9.6l8-4.8z",
  pause: "M5.4 3.4v9.2 M10.6 3.4v9.2",
  abort: "M4 4h8v8H4z",
};
const BUTTONS = [
  ["step", "s", "run the next line, into functions that it calls"],
  ["next", "n", "run the next line, functions that it calls in one go"],
  ["out", "o", "run until this function returns"],
  ["continue", "c", "run to the next breakpoint"],
  ["pause", "p", "stop all workers at their next line"],
  ["abort", "", "end the program on all workers"],
];
const SYMBOLS = {
  paused: "❚❚", running: "▶", collective: "⋯", done: "✓", error: "✕", aborted: "■", out: "–",
};
const HINTS = [
  ["%%disco --step", "stop at the first line of a cell"],
  ["%%disco -b 5", "stop at its line 5"],
  ["breakpoint()", "in code stops there"],
  ["%disco_break model.py:12 if rank == 2", "stops in a file"],
];

function icon(name) {
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", `dls-icon dls-icon-${name}`);
  const path = document.createElementNS(ns, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

function startStepper(root, send) {
  const me = Math.random().toString(36).slice(2);
  let frame = {}, only = new Set(), sent = 0, colours = {};

  // -- what there is
  const symbol = element("span", { class: "dls-symbol", "aria-hidden": "true" });
  const state = element("span", { class: "dls-state" });
  const pill = element("span", { class: "dls-pill" }, symbol, state);
  const program = element("strong", { class: "dls-program" });
  const reason = element("span", { class: "dls-reason" });
  const title = element("span", { class: "dls-title" });
  const head = element("div", { class: "dls-head" }, pill, program, reason, title);

  const buttons = Object.fromEntries(BUTTONS.map(([name, key, words]) => [name, element("button", {
    class: `dls-button dls-${name}`, type: "button", title: key ? `${words} (${key})` : words,
    "aria-label": name, onclick: () => press(name),
  }, icon(name), element("span", { class: "dls-label" }, name),
  key ? element("kbd", { "aria-hidden": "true" }, key) : null)]));
  const who = element("div", { class: "dls-only", role: "group", "aria-label": "workers that commands are for" });
  const bar = element("div", { class: "dls-bar" },
    element("div", { class: "dls-buttons" }, ...Object.values(buttons)), who);

  const error = element("div", { class: "dls-error", role: "alert" });
  const places = element("div", { class: "dls-places" });
  const source = startSource((file, line) => send("toggle", { file, line }));
  const frames = element("div", { class: "dls-frames", role: "listbox", "aria-label": "stack" });
  const breaks = element("div", { class: "dls-breaks" });
  const stackBox = element("div", { class: "dls-box" }, element("h4", {}, "stack"), frames);
  const breakBox = element("div", { class: "dls-box" }, element("h4", {}, "breakpoints"), breaks);
  const side = element("div", { class: "dls-side" }, stackBox, breakBox);
  const hint = element("div", { class: "dls-hint" },
    ...HINTS.map(([code, words]) => element("div", {}, element("code", {}, code), element("span", {}, words))));
  const values = startValues();
  const field = element("input", {
    type: "text", class: "dls-field", spellcheck: "false", autocomplete: "off",
    "aria-label": "expression", placeholder: "an expression, evaluated on each worker: x.sum()",
  });
  const asked = element("div", { class: "dls-ask" }, element("span", { class: "dls-prompt", "aria-hidden": "true" }, "≫"), field);
  const results = startResults();
  const panel = element("div", { class: "dls", tabindex: "0", role: "group", "aria-label": "debugger" },
    head, bar, error, places, element("div", { class: "dls-main" },
      element("div", { class: "dls-left" }, source.node, hint), side), values.node, asked, results.node);
  root.append(panel);

  // -- what a person does
  const ranks = () => (only.size ? [...only] : null);
  const waiting = () => sent > (frame.heard?.[me] ?? 0);

  function press(name) {
    // one at a time: a key that is held down steps no further than what is seen
    if (!frame.can?.[name] || (waiting() && name !== "pause" && name !== "abort")) return;
    sent = Math.max(sent, frame.heard?.[me] ?? 0) + 1;
    send(name, { ranks: ranks(), view: me, number: sent });
  }

  panel.addEventListener("keydown", (event) => {
    if (event.target === field) {
      event.stopPropagation(); // the notebook's keys
      if (event.key === "Enter" && field.value.trim()) {
        send("eval", { text: field.value, ranks: ranks() });
        field.select();
      } else if (event.key === "Escape") panel.focus({ preventScroll: true });
      return;
    }
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const found = BUTTONS.find(([, key]) => key && key === event.key);
    if (!found) return;
    event.preventDefault();
    event.stopPropagation();
    press(found[0]);
  });
  // what is clicked may be gone or disabled with the next picture: then keys would go nowhere
  panel.addEventListener("click", (event) => {
    if (event.target.closest("button")) panel.focus({ preventScroll: true });
  });

  function choose(rank) {
    if (rank === null) only = new Set();
    else if (!only.delete(rank)) only.add(rank);
    drawWho();
  }

  // -- drawing
  const drawn = new Map();
  function redraw(node, facts, make) {
    const now = JSON.stringify(facts);
    if (drawn.get(node) === now) return;
    drawn.set(node, now);
    node.replaceChildren(...make());
  }

  function drawWho() {
    redraw(who, [frame.workers?.map((one) => [one.rank, one.state]), colours, [...only]], () => [
      element("button", { type: "button", class: "dls-all", "aria-pressed": String(!only.size),
        title: "commands are for all workers", onclick: () => choose(null) }, "all"),
      ...frame.workers.map((one) => element("button", {
        type: "button", class: `dls-one dls-is-${one.state}`, style: `--rank: ${one.colour}`,
        "aria-pressed": String(only.has(one.rank)),
        "aria-label": `worker ${one.rank}`,
        title: `commands are for worker ${one.rank} (${one.state})`, onclick: () => choose(one.rank),
      }, element("span", { class: "dls-mini", "aria-hidden": "true" }, SYMBOLS[one.state] ?? "•"), String(one.rank))),
    ]);
  }

  function drawPlaces() {
    // the head tells it all if all stand at one place
    const [one] = frame.places;
    places.hidden = !one || (frame.places.length === 1 && one.state === "paused" && !one.note);
    redraw(places, [frame.places, frame.focus, colours], () => frame.places.map((place) =>
      element("button", {
        type: "button", class: `dls-place dls-look-${place.state}`,
        "aria-pressed": String(place.ranks.includes(frame.focus)), disabled: !place.known,
        title: place.known ? "show this source" : null,
        onclick: () => send("focus", { rank: place.ranks[0] }),
      }, chips(place.ranks, colours, frame.workers.length),
      element("span", { class: "dls-sym", "aria-hidden": "true" }, SYMBOLS[place.state] ?? "•"),
      element("span", { class: "dls-told" }, place.words,
        place.note ? element("span", { class: "dls-why" }, place.note) : null))));
  }

  function drawStack() {
    stackBox.hidden = !frame.stack.length;
    redraw(frames, [frame.stack, frame.frame], () => frame.stack.map((one, i) => element("button", {
      type: "button", class: "dls-frame", role: "option", "aria-selected": String(i === frame.frame),
      onclick: () => send("frame", { frame: i }),
    }, element("span", { class: "dls-function" }, one.function), element("span", { class: "dls-muted" }, one.place))));
  }

  function drawBreaks() {
    breakBox.hidden = !frame.breaks.length;
    redraw(breaks, frame.breaks, () => frame.breaks.map((one) => element("div", { class: "dls-break" },
      element("span", { class: `dls-dot dls-set${one.condition ? " dls-if" : ""}`, "aria-hidden": "true" }),
      element("span", { class: "dls-told" }, `${one.number} · ${one.place}`,
        one.condition ? element("code", {}, ` if ${one.condition}`) : null),
      element("button", { type: "button", class: "dls-clear", title: `remove breakpoint ${one.number}`,
        "aria-label": `remove breakpoint ${one.number}`, onclick: () => send("clear", { number: one.number }) }, "✕"))));
  }

  function update(latest) {
    if (latest.state === undefined) return;
    frame = latest;
    colours = Object.fromEntries(frame.workers.map((one) => [one.rank, one.colour]));
    panel.dataset.state = frame.state;
    setText(symbol, SYMBOLS[frame.state] ?? (frame.state === "ended" ? "✓" : "○"));
    setText(state, frame.state);
    setText(program, frame.program);
    setText(reason, frame.reason);
    setText(title, frame.title);
    setText(error, frame.error);
    error.title = frame.error;
    error.hidden = !frame.error;
    for (const [name, button] of Object.entries(buttons)) {
      const off = !frame.can[name];
      if (off && button === document.activeElement) panel.focus({ preventScroll: true });
      button.disabled = off;
    }
    field.disabled = !frame.can.eval;
    asked.hidden = !frame.can.eval && !frame.results.length;
    for (const rank of only) if (!(rank in colours)) only.delete(rank);
    drawWho();
    drawPlaces();
    source.update(frame.source, colours);
    hint.hidden = frame.state === "paused" || frame.state === "running";
    drawStack();
    drawBreaks();
    side.hidden = stackBox.hidden && breakBox.hidden;
    values.update(frame.tables, frame.stale, colours);
    results.update(frame.results, colours);
  }

  return { update };
}

export default { render: disco(startStepper) };
