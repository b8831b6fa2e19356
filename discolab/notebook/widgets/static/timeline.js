// Lanes of time, one a worker, drawn on a canvas; all text that one reads at length is in the page.
//
// The kernel tells what is to be drawn in the window that is wished for; until it has, what is there
// is stretched. Times are ns after the first event. Places come in quarters of a pixel.

const GUTTER = 58, AXIS = 20, FINE = 4, ASK_EVERY = 60, ASK_AGAIN = 500;
const SHORTEST = 1000; // ns
const HEIGHTS = { 0: 18, 1: 14, 2: 14, 3: 14, 5: 18, 6: 0, 7: 12, 8: 12 };
const KINDS = { 0: "command", 1: "span", 2: "span", 3: "span", 5: "collective", 6: "mark",
  7: "CPU (profiler)", 8: "GPU (profiler)" };
const STATES = ["done", "running", "waiting", "stopped", "failed"];
const RUNNING = 1, WAITING = 2, STOPPED = 3, FAILED = 4;
const SITE_HEADS = ["collective", "called at", "times", "waited in all", "last to come"];

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function duration(ns) {
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]])
    if (ns >= size) return `${(ns / size).toPrecision(3).replace(/\.0+$/, "")} ${unit}`;
  return `${Math.round(ns)} ns`;
}

function chip(rank, colour) {
  return element("span", { class: "dt-chip", style: `--rank: ${colour}` }, String(rank));
}

function stripes(ctx, colour, slope, back) {
  const size = 8, tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.fillStyle = back;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = colour;
  pen.lineWidth = 2.6;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift - 2, slope > 0 ? size + 2 : -2);
    pen.lineTo(shift + size + 2, slope > 0 ? -2 : size + 2);
    pen.stroke();
  }
  return ctx.createPattern(tile, "repeat");
}

// The lanes: what is drawn where, and what is under the pointer.
class Lanes {
  constructor(canvas) {
    this.canvas = canvas;
    this.ctx = canvas.getContext("2d");
    this.rows = [0, 5];
    this.boxes = [];
    this.theme = "";
  }

  colours(root) {
    const ink = getComputedStyle(root).color;
    if (ink === this.theme) return;
    this.theme = ink;
    const [r, g, b] = ink.match(/[\d.]+/g).map(Number);
    const dark = r + g + b > 380;
    this.ink = ink;
    this.faint = `rgba(${r}, ${g}, ${b}, 0.16)`;
    this.muted = `rgba(${r}, ${g}, ${b}, 0.72)`;
    this.halo = dark ? "rgba(17, 17, 17, 0.8)" : "rgba(255, 255, 255, 0.85)";
    this.moving = dark ? "#3d8fc9" : "#69b0dd";
    this.span = dark ? "rgba(0, 158, 115, 0.55)" : "rgba(0, 158, 115, 0.4)";
    this.span2 = dark ? "rgba(0, 158, 115, 0.36)" : "rgba(0, 158, 115, 0.24)";
    this.profiled = dark ? "rgba(204, 121, 167, 0.6)" : "rgba(204, 121, 167, 0.55)";
    this.waiting = stripes(this.ctx, "#e69f00", 1, dark ? "#4a3c1c" : "#fdf1d8");
    this.failed = stripes(this.ctx, "#d53c00", -1, dark ? "#4d231a" : "#fde3da");
  }

  laneHeight() {
    return 8 + this.rows.reduce((sum, row) => sum + (HEIGHTS[row] ? HEIGHTS[row] + 1 : 0), 0);
  }

  resize(width, lanes) {
    const height = AXIS + lanes * this.laneHeight() + 1;
    const scale = window.devicePixelRatio || 1;
    const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
      this.canvas.style.height = `${height}px`;
    }
    this.ctx.setTransform(scale, 0, 0, scale, 0, 0);
    [this.width, this.height] = [width, height];
  }

  rowTop(lane, row) {
    let top = AXIS + lane * this.laneHeight() + 4;
    for (const other of this.rows) {
      if (other === row) break;
      if (HEIGHTS[other]) top += HEIGHTS[other] + 1;
    }
    return top;
  }

  draw(view, shown, workers, marked) {
    const { ctx } = this;
    ctx.clearRect(0, 0, this.width, this.height);
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    this.boxes = [];
    const plot = this.width - GUTTER;
    const place = (time) => GUTTER + ((time - view.t0) / (view.t1 - view.t0)) * plot;
    this.axis(view, plot, place);
    if (!shown) return;
    ctx.save();
    ctx.beginPath();
    ctx.rect(GUTTER, 0, plot, this.height);
    ctx.clip();
    const step = (shown.t1 - shown.t0) / (FINE * shown.width);
    workers.forEach((worker, lane) => {
      const rows = shown.lanes[worker.rank] ?? {};
      for (const row of this.rows) {
        for (const one of rows[row] ?? []) {
          const begin = shown.t0 + one.begin * step, end = shown.t0 + one.end * step;
          const box = {
            lane, row, rank: worker.rank, colour: worker.colour, begin, end,
            x0: place(begin), x1: Math.max(place(end), place(begin) + 1),
            top: this.rowTop(lane, row), high: HEIGHTS[row],
            state: one.state, name: shown.names[one.name], count: one.count, seq: one.seq,
            waited: one.waited * step,
          };
          if (box.x1 < GUTTER || box.x0 > this.width) continue;
          this.boxes.push(box);
        }
      }
    });
    for (const box of this.boxes) if (box.row !== 6) this.box(box, place);
    this.marks();
    for (const one of marked) this.outline(one, place, workers);
    ctx.restore();
  }

  axis(view, plot, place) {
    const { ctx } = this, span = (view.t1 - view.t0) / 1e9;
    const least = (span * 96) / plot;
    const power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= least);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    ctx.fillStyle = this.muted;
    ctx.strokeStyle = this.faint;
    ctx.lineWidth = 1;
    ctx.textAlign = "left";
    const lane = this.laneHeight();
    for (let y = AXIS + 0.5; y < this.height; y += lane) this.line(0, y, this.width, y);
    let free = GUTTER;
    const first = Math.ceil(view.t0 / 1e9 / step - 1e-9);
    for (let n = first; n * step * 1e9 <= view.t1; n++) {
      const x = Math.round(place(n * step * 1e9)) + 0.5;
      if (x < GUTTER) continue;
      this.line(x, AXIS - 5, x, this.height);
      const label = `${(n * step).toFixed(digits)} s`, wide = ctx.measureText(label).width;
      if (x + 4 < free || x + 4 + wide > this.width) continue;
      ctx.fillText(label, x + 4, AXIS / 2);
      free = x + wide + 14;
    }
  }

  line(x0, y0, x1, y1) {
    this.ctx.beginPath();
    this.ctx.moveTo(x0, y0);
    this.ctx.lineTo(x1, y1);
    this.ctx.stroke();
  }

  box(box, place) {
    const { ctx } = this, { x0, x1, top, high, row, state } = box, wide = x1 - x0;
    ctx.globalAlpha = box.count > 1 ? 0.6 : 1; // several, and what is between them
    const fill = (style, from = x0, to = x1) => {
      ctx.fillStyle = style;
      ctx.fillRect(from, top, Math.max(to - from, 0.7), high);
    };
    if (row === 0) {
      fill(`${box.colour}80`);
      if (wide > 4) {
        ctx.fillStyle = box.colour;
        ctx.fillRect(x0, top, 2, high);
      }
    } else if (row === 5) {
      fill(this.moving);
      const waits = state === WAITING ? x1 : Math.min(x1, place(box.begin + box.waited));
      if (waits - x0 > 0.5) {
        ctx.save();
        ctx.translate(x0 % 8, 0); // the pattern moves with what it is in
        ctx.fillStyle = this.waiting;
        ctx.fillRect(x0 - (x0 % 8), top, waits - x0, high);
        ctx.restore();
      }
    } else {
      fill(row > 6 ? this.profiled : row === 2 ? this.span2 : this.span);
      if (wide > 4) {
        ctx.fillStyle = row > 6 ? "#cc79a7" : "#009e73";
        ctx.fillRect(x0, top, 1.5, high);
      }
    }
    ctx.globalAlpha = 1;
    if (state === FAILED) fill(this.failed, Math.max(x0, x1 - Math.max(6, wide / 4)));
    if (state >= STOPPED && wide > 2) {
      ctx.strokeStyle = state === FAILED ? "#d53c00" : this.muted;
      ctx.setLineDash(state === FAILED ? [] : [3, 2]);
      ctx.lineWidth = 1.5;
      ctx.strokeRect(x0 + 0.75, top + 0.75, wide - 1.5, high - 1.5);
      ctx.setLineDash([]);
    }
    if (state === RUNNING || state === WAITING) {
      ctx.fillStyle = this.ink;
      for (let y = top + 1; y < top + high; y += 4) ctx.fillRect(x1 - 1.5, y, 1.5, 2);
    }
    this.label(box);
  }

  label(box) {
    const { ctx } = this;
    const left = Math.max(box.x0, GUTTER) + 5, room = Math.min(box.x1, this.width) - left - 3;
    if (room < 18) return;
    const sign = { [FAILED]: "✕ ", [STOPPED]: "◼ " }[box.state] ?? "";
    let text = sign + (box.count > 1 ? `${box.count} × ${box.name}` : box.name);
    if (ctx.measureText(text).width > room) {
      const fit = Math.floor((text.length * room) / ctx.measureText(text).width) - 1;
      if (fit < 3) return;
      text = `${text.slice(0, fit)}…`;
    }
    ctx.lineWidth = 3;
    ctx.lineJoin = "round";
    if (box.row === 5) {
      ctx.strokeStyle = this.halo;
      ctx.strokeText(text, left, box.top + box.high / 2 + 0.5);
    }
    ctx.fillStyle = this.ink;
    ctx.fillText(text, left, box.top + box.high / 2 + 0.5);
    box.told = left + ctx.measureText(text).width; // where its name ends
  }

  // A mark is a line through its lane, with a flag; its name where there is room for it.
  marks() {
    const { ctx } = this, marks = this.boxes.filter((box) => box.row === 6);
    marks.forEach((box, i) => {
      const top = AXIS + box.lane * this.laneHeight() + 1, x = box.x0;
      Object.assign(box, { top, high: this.laneHeight() - 2, x1: x + 5 });
      ctx.fillStyle = this.ink;
      ctx.fillRect(x - 0.5, top, 1, box.high);
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x + 6, top + 3);
      ctx.lineTo(x, top + 6);
      ctx.fill();
      const next = marks[i + 1], room = (next?.lane === box.lane ? next.x0 : this.width) - x - 12;
      const text = box.count > 1 ? `${box.count} marks` : box.name;
      const taken = this.boxes.some((other) => other.row === 0 && other.lane === box.lane &&
        other.told > x + 4 && other.x0 < x + 8);
      if (taken || ctx.measureText(text).width > room) return;
      ctx.fillText(text, x + 9, this.rowTop(box.lane, 0) + HEIGHTS[0] / 2 + 0.5);
    });
  }

  outline(one, place, workers) {
    const lane = workers.findIndex((worker) => worker.rank === one.rank);
    if (lane < 0) return;
    const { ctx } = this;
    const x0 = place(one.begin), x1 = Math.max(place(one.end), x0 + 2);
    const mark = one.row === 6;
    const top = mark ? AXIS + lane * this.laneHeight() + 1 : this.rowTop(lane, one.row);
    const high = mark ? this.laneHeight() - 2 : HEIGHTS[one.row];
    ctx.strokeStyle = this.ink;
    ctx.lineWidth = one.strong ? 2 : 1.25;
    ctx.setLineDash(one.strong ? [] : [4, 2]);
    ctx.strokeRect(x0 - 1, top - 1, x1 - x0 + 2, high + 2);
    ctx.setLineDash([]);
  }

  at(x, y) {
    let best = null, near = 4;
    for (const box of this.boxes) {
      if (y < box.top || y > box.top + box.high) continue;
      const off = x < box.x0 ? box.x0 - x : x > box.x1 ? x - box.x1 : 0;
      if (off < near || (off === 0 && best && box.x1 - box.x0 < best.x1 - best.x0)) {
        [best, near] = [box, off];
      }
    }
    return best;
  }
}

function words(box) {
  const many = box.count > 1 ? `${box.count} short ones, the longest ` : "";
  const state = STATES[box.state] === "done" ? "" : `, ${STATES[box.state]}`;
  if (box.row === 6) return `worker ${box.rank} · mark ${many}${box.name}`;
  const waited = box.waited > 0 ? `, of which ${duration(box.waited)} waiting` : "";
  return `worker ${box.rank} · ${KINDS[box.row]} ${many}${box.name} · ≈ ` +
    `${duration(box.end - box.begin)}${waited}${state}`;
}

// A row as the kernel tells it: numbers with commas between, see `_rows` in timeline.py.
function unpacked(row) {
  const numbers = row.split(",").map(Number), spans = [];
  for (let i = 0, last = 0, seq = 0; i + 6 < numbers.length; i += 7) {
    const begin = last + numbers[i];
    last = begin + numbers[i + 1];
    seq += numbers[i + 5];
    spans.push({ begin, end: last, state: numbers[i + 2], name: numbers[i + 3],
      count: numbers[i + 4] || 1, seq, waited: numbers[i + 6] });
  }
  return spans;
}

function unpack(view) {
  const lanes = {};
  for (const [rank, rows] of Object.entries(view.lanes)) {
    lanes[rank] = {};
    for (const [row, text] of Object.entries(rows)) lanes[rank][row] = unpacked(text);
  }
  return { ...view, lanes };
}

// What is known of one event, below the lanes.
function detailsView(close) {
  const body = element("div", { class: "dt-details", role: "region", "aria-live": "polite",
    "aria-label": "details of the chosen event", hidden: true });
  return {
    body,
    hide() {
      body.hidden = true;
      body.replaceChildren();
    },
    show(found) {
      const most = Math.max(1, ...found.members.map((one) => one.share));
      const facts = found.facts.flatMap(([name, value]) => [
        element("dt", {}, name), element("dd", {}, value)]);
      const members = found.members.map((one) => element("tr", {},
        element("td", {}, chip(one.rank, one.colour)),
        element("td", {}, one.came, one.last ? element("b", {}, " ◀ last") : "",
          ["done", "waiting"].includes(one.state) ? "" : ` ${one.state}`),
        element("td", {}, element("span", { class: "dt-bar",
          style: `width: ${Math.round((90 * one.share) / most)}px` }), ` ${one.waited}`)));
      const table = members.length ? element("table", {},
        element("thead", {}, element("tr", {},
          ...["worker", "came", "waited"].map((head) => element("th", {}, head)))),
        element("tbody", {}, ...members)) : null;
      body.replaceChildren(
        element("div", { class: "dt-top" }, chip(found.rank, found.colour),
          element("b", {}, found.name), element("span", { class: "dt-muted" },
            [found.kind, found.others].filter(Boolean).join(" · ")),
          element("button", { onclick: close, "aria-label": "close details", title: "close (Esc)" },
            "×")),
        element("div", { class: "dt-facts" }, element("dl", {}, ...facts), table ?? ""));
      body.hidden = false;
    },
  };
}

function summaryView() {
  const sites = element("tbody"), workers = element("tbody");
  const none = element("div", { class: "dt-muted" }, "no collective yet");
  const more = element("div", { class: "dt-muted" });
  const table = element("table", { class: "dt-sites" },
    element("thead", {}, element("tr", {},
      ...SITE_HEADS.map((head) => element("th", { scope: "col" }, head)))), sites);
  const body = element("div", { class: "dt-summary" },
    element("section", {}, element("h4", {}, "waiting by place in the program"), table, none, more),
    element("section", {}, element("h4", {}, "time of the workers"),
      element("table", { class: "dt-workers" }, workers)));
  let before = "";
  const siteRow = (one, most) => element("tr", {},
    element("td", {}, one.name),
    element("td", { class: "dt-site" }, one.site),
    element("td", { class: "dt-number" }, String(one.count)),
    element("td", {}, element("span", { class: "dt-bar",
      style: `width: ${Math.round((64 * one.ns) / most)}px` }), ` ${one.waited}`),
    element("td", {}, ...(one.rank == null ? [] :
      [chip(one.rank, one.colour), ` ${one.times} of ${one.count} times`])));
  const workerRow = (one) => element("tr", {},
    element("td", {}, chip(one.rank, one.colour)),
    element("td", {}, element("span", { class: "dt-shares", "aria-hidden": "true" },
      element("i", { style: `width: ${one.busy}%; background: ${one.colour}99` }),
      element("i", { class: "dt-waiting", style: `width: ${one.waiting}%` }))),
    element("td", {}, `busy ${one.busy} %, waiting ${one.waiting} %, idle ${one.idle} %` +
      (one.failed ? `, ${one.failed} failed` : "")));
  return {
    body,
    update(found) {
      const now = JSON.stringify(found);
      if (now === before) return;
      before = now;
      const most = Math.max(1, ...found.sites.map((one) => one.ns));
      sites.replaceChildren(...found.sites.map((one) => siteRow(one, most)));
      workers.replaceChildren(...found.workers.map(workerRow));
      table.hidden = !found.sites.length;
      none.hidden = !table.hidden;
      setText(more, found.more ? `and ${found.more} more` : "");
      body.hidden = !found.workers.length;
    },
  };
}

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
      setText(info, `${frame.count.toLocaleString("en")} events`);
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
      clearTimeout(asking);
      cancelAnimationFrame(drawing);
    },
  };
}

export default { render: disco(timeline) };
