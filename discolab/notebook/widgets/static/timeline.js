// The timeline: its buttons and keys, the window of time that is wished for, and who hears what.
// The lanes are drawn in timeline_lanes.js; the tables below are timeline_tables.js.

const ASK_EVERY = 60, ASK_AGAIN = 500; // ms
const SHORTEST = 1000; // ns

function timeline(root, send) {
  const me = Math.random().toString(36).slice(2);
  const view = { mode: "follow", span: 10e9, t0: 0, t1: 10e9 };
  let frame = null, shown = null, number = 0, asked = 0, asking = 0, drawing = 0;
  let chosen = null, members = [], hovered = null, written = "";

  const button = (text, title, action, more = {}) =>
    element("button", { title, onclick: action, ...more }, text);
  const record = button("", "record what the workers do, or not",
    () => send(frame?.on ? "off" : "on"));
  const follow = button("follow", "show the last moments as they come (End)", () => toggle());
  const fit = button("fit", "show all there is (0)", () => ask({ mode: "all" }));
  const clear = button("clear", "forget what was recorded", () => {
    written = "";
    unchoose();
    send("clear");
  });
  const save = button("export", "write it to a file beside the notebook, for Perfetto or Chrome",
    () => send("export"));
  const info = element("span", { class: "dt-muted dt-info" });
  const title = element("span", { class: "dt-muted" });
  const notice = element("div", { class: "dt-notice", role: "status", hidden: true });
  const canvas = element("canvas", { role: "img" });
  const labels = element("div", { class: "dt-labels", "aria-hidden": "true" });
  const tip = element("div", { class: "dt-tip", role: "tooltip", hidden: true });
  const empty = element("div", { class: "dt-empty" });
  const stage = element("div", { class: "dt-stage", tabindex: 0, role: "application",
    "aria-label": "timeline. Left and right move, plus and minus zoom, 0 shows all, End follows, " +
      "up and down choose a worker, N and P an event, Enter shows its details" },
    canvas, labels, tip, empty);
  const legend = element("div", { class: "dt-legend" },
    ...[["command", "command"], ["span", "your spans"], ["moving", "collective"],
      ["waiting", "waiting in it for others"], ["failed", "failed"]].map(([kind, text]) =>
      element("span", { class: `dt-key dt-key-${kind}` },
        element("i", { class: `dt-${kind}` }), text)),
    element("span", { class: "dt-muted dt-hint" },
      "drag or ←→ to move · Ctrl+wheel or + − to zoom · click for details"));
  const details = detailsView(() => unchoose());
  const summary = summaryView();
  root.append(element("div", { class: "dt" },
    element("div", { class: "dt-head" }, element("b", {}, "timeline"), title),
    element("div", { class: "dt-tools", role: "toolbar", "aria-label": "timeline" },
      record,
      element("span", { class: "dt-group" }, follow,
        button("−", "show more time (-)", () => zoom(2)),
        button("+", "show less time (+)", () => zoom(0.5)), fit),
      element("span", { class: "dt-group" }, clear, save), info),
    notice, stage, legend, details.body, summary.body));
  const lanes = new Lanes(canvas);

  // -- the window ---------------------------------------------------------------------------------

  const plot = () => Math.max(stage.clientWidth - GUTTER, 50);
  const tell = () => {
    asking = 0;
    asked = Date.now();
    number += 1;
    send("view", { me, number, mode: view.mode, width: Math.round(plot()),
      span: Math.round(view.span), t0: Math.round(view.t0), t1: Math.round(view.t1) });
  };
  const ask = (change = {}) => {
    Object.assign(view, change);
    if (!asking) asking = setTimeout(tell, Math.max(0, ASK_EVERY - (Date.now() - asked)));
    schedule();
  };
  const fixed = (t0, t1) => {
    const wide = Math.max(t1 - t0, SHORTEST);
    const [first, last] = frame.extent; // some of what was recorded stays in sight
    const begin = Math.max(first - 0.9 * wide, Math.min(t0, last - 0.1 * wide));
    ask({ mode: "fixed", t0: begin, t1: begin + wide });
  };
  const toggle = () => {
    if (!frame) return;
    if (view.mode === "follow") fixed(view.t0, view.t1);
    else ask({ mode: "follow", span: Math.max(SHORTEST, (view.t1 - view.t0) / 1.02) });
  };
  const pan = (share) => {
    if (!frame) return;
    const by = share * (view.t1 - view.t0);
    fixed(view.t0 + by, view.t1 + by);
  };
  const zoom = (factor, x = null) => {
    if (!frame) return;
    const wide = view.t1 - view.t0;
    if (factor > 1 && frame && wide * factor > 4 * (frame.extent[1] - frame.extent[0]) + 1e9)
      return ask({ mode: "all" });
    if (view.mode === "follow" && x == null) {
      const span = Math.max(SHORTEST, Math.min(view.span, wide) * factor);
      return ask({ span, t0: view.t1 - 1.02 * span });
    }
    const middle = x == null ? 0.5 : (x - GUTTER) / plot();
    const at = view.t0 + middle * wide;
    fixed(at - middle * wide * factor, at + (1 - middle) * wide * factor);
  };

  // -- drawing ------------------------------------------------------------------------------------

  const schedule = () => {
    if (!drawing) drawing = requestAnimationFrame(draw);
  };
  const marked = () => {
    const found = members.map((one) => ({ ...one, row: 5 }));
    if (chosen) found.push({ ...chosen, strong: true });
    if (hovered && !(chosen && hovered.seq === chosen.seq && hovered.rank === chosen.rank))
      found.push({ ...hovered, strong: true });
    return found;
  };
  const draw = () => {
    drawing = 0;
    if (!frame || !stage.clientWidth) return;
    lanes.colours(root);
    lanes.resize(stage.clientWidth, frame.lanes.length);
    lanes.draw(view, shown, frame.lanes, marked());
    placeLabels();
  };
  const placeLabels = () => {
    while (labels.children.length > frame.lanes.length) labels.lastChild.remove();
    frame.lanes.forEach((worker, i) => {
      let label = labels.children[i];
      if (!label) {
        label = element("div", { class: "dt-label" }, chip(worker.rank, worker.colour),
          element("small"));
        labels.append(label);
      }
      setText(label.lastChild, worker.device);
      label.style.top = `${AXIS + i * lanes.laneHeight()}px`;
      label.style.height = `${lanes.laneHeight()}px`;
    });
  };

  // -- events under the pointer and the keys --------------------------------------------------------

  const choose = (box) => {
    chosen = { rank: box.rank, row: box.row, seq: box.seq, begin: box.begin, end: box.end };
    members = [];
    send("details", { me, rank: box.rank, row: box.row, seq: box.seq, count: box.count,
      at: Math.round(box.begin) });
    schedule();
  };
  const unchoose = () => {
    chosen = hovered = null;
    members = [];
    details.hide();
    schedule();
  };
  const hover = (box, x = null) => {
    hovered = box;
    tip.hidden = !box;
    canvas.style.cursor = box ? "pointer" : "grab";
    if (box) {
      setText(tip, words(box));
      const left = Math.max(x ?? (Math.max(box.x0, GUTTER) + Math.min(box.x1, lanes.width)) / 2, 4);
      tip.style.top = `${Math.min(box.top + box.high + 6, lanes.height - 4)}px`;
      tip.style.left = `${Math.max(0, Math.min(left, lanes.width - tip.offsetWidth - 2))}px`;
    }
    schedule();
  };
  const step = (lane, by) => {
    const all = lanes.boxes.filter((box) => box.lane === lane).sort((a, b) => a.begin - b.begin);
    if (!all.length) return;
    const here = hovered ?? chosen;
    let at = here ? all.findIndex((box) =>
      box.row === here.row && box.seq === here.seq && box.rank === here.rank) : -1;
    if (at < 0 && here) at = all.findIndex((box) => box.begin >= here.begin) - (by > 0 ? 1 : 0);
    else if (at < 0) at = by > 0 ? -1 : all.length;
    hover(all[Math.max(0, Math.min(all.length - 1, at + by))]);
  };

  let held = null;
  const where = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    held = { x: event.clientX, moved: false, t0: view.t0, t1: view.t1 };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return hover(lanes.at(...where(event)), where(event)[0]);
    const dx = event.clientX - held.x;
    if (!held.moved && Math.abs(dx) < 4) return;
    held.moved = true;
    hover(null);
    canvas.style.cursor = "grabbing";
    const by = (dx / plot()) * (held.t1 - held.t0);
    fixed(held.t0 - by, held.t1 - by);
  });
  canvas.addEventListener("pointerup", (event) => {
    const clicked = held && !held.moved;
    held = null;
    const box = lanes.at(...where(event));
    if (clicked) box ? choose(box) : unchoose();
  });
  canvas.addEventListener("pointercancel", () => (held = null));
  canvas.addEventListener("pointerleave", () => held || hover(null));
  stage.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 150), where(event)[0]);
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / plot());
    }
  }, { passive: false });
  const keys = {
    ArrowLeft: () => pan(-0.2),
    ArrowRight: () => pan(0.2),
    ArrowUp: () => step(Math.max(0, ((hovered ?? chosen)?.lane ?? laneOf(chosen) ?? 0) - 1), 1),
    ArrowDown: () => step(Math.min(frame.lanes.length - 1,
      ((hovered ?? chosen)?.lane ?? laneOf(chosen) ?? -1) + 1), 1),
    n: () => step(hovered?.lane ?? laneOf(chosen) ?? 0, 1),
    p: () => step(hovered?.lane ?? laneOf(chosen) ?? 0, -1),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    0: () => ask({ mode: "all" }),
    End: () => view.mode === "follow" || toggle(),
    Enter: () => hovered && choose(hovered),
    Escape: () => (hover(null), unchoose()),
  };
  const laneOf = (one) => {
    const lane = one && frame ? frame.lanes.findIndex((worker) => worker.rank === one.rank) : -1;
    return lane < 0 ? undefined : lane;
  };
  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || !frame) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  });

  const sized = new ResizeObserver(() => {
    schedule();
    if (shown && Math.abs(shown.width - plot()) > 2) ask();
  });
  sized.observe(stage);
  // a canvas keeps the colours with which it was drawn; a theme's style may come after its name
  const themed = () => [0, 300, 1500].forEach((after) => setTimeout(schedule, after));
  const theme = new MutationObserver(themed);
  for (const node of [document.documentElement, document.body])
    theme.observe(node, { attributes: true,
      attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "data-theme", "class"] });
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", themed);

  const note = () => {
    const notes = [frame.notice, ...frame.missing, written].filter(Boolean);
    setText(notice, notes.join("\n"));
    notice.hidden = !notes.length;
  };

  return {
    update(next) {
      if (!next.lanes) return;
      frame = next;
      const mine = frame.views[me];
      if (!mine && Date.now() - asked > ASK_AGAIN) tell(); // the kernel does not know us (any more)
      const told = mine ?? frame.views[""];
      if (told) shown = unpack(told);
      if (shown && view.mode !== "fixed" && (!mine || mine.number >= number))
        Object.assign(view, { t0: shown.t0, t1: shown.t1 });
      for (const rows of Object.values(shown?.lanes ?? {}))
        for (const row of Object.keys(rows).map(Number))
          if (!lanes.rows.includes(row)) lanes.rows = [...lanes.rows, row].sort((a, b) => a - b);
      setText(title, frame.title);
      setText(record,
        (frame.on ? "● tracing on" : "○ tracing off") + (frame.profiled ? ", profiler too" : ""));
      record.setAttribute("aria-pressed", String(frame.on));
      follow.setAttribute("aria-pressed", String(view.mode === "follow"));
      fit.setAttribute("aria-pressed", String(view.mode === "all"));
      setText(info, `${frame.count.toLocaleString("en")} events${frame.behind ? " so far" : ""}`);
      note();
      setText(empty, frame.count ? "" : frame.on ?
        "Nothing recorded yet: run a cell on the workers." :
        "Tracing is off: switch it on, then run a cell on the workers.");
      empty.hidden = frame.count > 0;
      save.disabled = clear.disabled = !frame.count;
      const worst = frame.summary.sites[0];
      canvas.setAttribute("aria-label", `${frame.title}, ${frame.count} events` + (worst ?
        `; most waiting, ${worst.waited}, in ${worst.name} at ${worst.site}` +
        (worst.rank == null ? "" : `, where worker ${worst.rank} came last most often`) : ""));
      summary.update(frame.summary);
      schedule();
    },
    message(content) {
      if (content.type === "details" && content.me === me) {
        members = content.details.members.filter((one) => one.end);
        if (chosen) Object.assign(chosen, { begin: content.details.begin, end: content.details.end });
        details.show(content.details);
        schedule();
      } else if (content.type === "exported") {
        written = `written to ${content.path}`;
        note();
      }
    },
    stop() {
      sized.disconnect();
      theme.disconnect();
      scheme.removeEventListener("change", themed);
      clearTimeout(asking);
      cancelAnimationFrame(drawing);
    },
  };
}

export default { render: disco(timeline) };
