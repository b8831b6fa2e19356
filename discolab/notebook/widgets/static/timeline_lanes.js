// Lanes of time, one a worker, drawn on a canvas; all text that one reads at length is in the page.
//
// The kernel tells what is to be drawn in the window that is wished for; until it has, what is there
// is stretched. Times are ns after the first event. Places come in quarters of a pixel.

const GUTTER = 58, AXIS = 20, FINE = 4;
const LONGEST_MARK = 150; // pixels of the name of a mark
const HEIGHTS = { 0: 18, 1: 14, 2: 14, 3: 14, 5: 18, 6: 0, 7: 12, 8: 12 };
const KINDS = { 0: "command", 1: "span", 2: "span", 3: "span", 5: "collective", 6: "mark",
  7: "CPU (profiler)", 8: "GPU (profiler)" };
const STATES = ["done", "running", "waiting", "stopped", "failed"];
const RUNNING = 1, WAITING = 2, STOPPED = 3, FAILED = 4;

function duration(ns) {
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]])
    if (ns >= size) return `${(ns / size).toPrecision(3).replace(/\.0+$/, "")} ${unit}`;
  return `${Math.round(ns)} ns`;
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
    const text = this.cut(sign + (box.count > 1 ? `${box.count} × ${box.name}` : box.name), room);
    if (!text) return;
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

  // As much of a text as has room; nothing if that says nothing.
  cut(text, room) {
    const wide = this.ctx.measureText(text).width;
    if (wide <= room) return text;
    const fit = Math.floor((text.length * room) / wide) - 1;
    return fit < 3 ? "" : `${text.slice(0, fit)}…`;
  }

  // A mark is a line through its lane, with a flag; its name where there is room for it.
  marks() {
    const { ctx } = this, marks = this.boxes.filter((box) => box.row === 6);
    const bars = this.boxes.filter((box) => box.row === 0);
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
      const mine = bars.filter((other) => other.lane === box.lane);
      const after = [marks[i + 1], ...mine].filter((other) => other?.lane === box.lane &&
        other.x0 > x + 1).map((other) => other.x0); // nothing is written over
      const text = box.count > 1 ? `${box.count} marks` : this.cut(box.name, LONGEST_MARK);
      const taken = mine.some((other) => other.told > x + 4 && other.x0 < x + 8);
      if (taken || ctx.measureText(text).width > Math.min(this.width, ...after) - x - 12) return;
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
