// A picture of one tensor over its workers: zoom, pan, cursor. Lengths are in elements of the sheet
// unless they say px. The kernel is asked for regions; while one is on its way the old is stretched.

const WAIT = 3000; // ms after which an answer is not waited for any more
const SETTLE = 40; // ms between a move and the question for what it shows
const LARGEST = 64; // px of one element
const LOUD = "#ff00c8";

function tickStep(extent, px, room) {
  const rough = Math.max(extent / Math.max(px / room, 1), 1e-9);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  return Math.max(step, 1);
}

function hatch(context, first, second) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const inner = tile.getContext("2d");
  inner.fillStyle = first;
  inner.fillRect(0, 0, 6, 6);
  inner.strokeStyle = second;
  inner.lineWidth = 1.6;
  inner.beginPath();
  for (const shift of [-6, 0, 6]) {
    inner.moveTo(shift - 1, 7);
    inner.lineTo(shift + 7, -1);
  }
  inner.stroke();
  return context.createPattern(tile, "repeat");
}

function plotView(root, send) {
  const asker = Math.random().toString(36).slice(2);
  let frame = null;
  let view = null; // { top, left, zoom }
  let pictures = []; // all of the tensor, then what was read last
  let cursor = null; // [row, column]
  let numbers = 0;
  let waiting = 0; // since when, in ms
  let again = false;
  let settling = 0;
  let drawing = 0;
  let pointing = 0;
  let drag = null;
  let area = { left: 0, top: 0, width: 1, height: 1 };

  const canvas = element("canvas", {
    tabindex: 0,
    role: "application",
    "aria-roledescription": "picture of a tensor",
    "data-lm-suppress-shortcuts": "true",
  });
  const title = element("div", { class: "dl-plot-title" });
  const note = element("div", { class: "dl-plot-note" });
  const readout = element("div", { class: "dl-plot-readout", "aria-live": "polite" });
  const low = element("span");
  const high = element("span");
  const swatch = element("span", { class: "dl-plot-swatch", "aria-hidden": "true" });
  const bad = element("span", { class: "dl-plot-bad", hidden: true });
  const loud = element("span", { class: "dl-plot-loud", "aria-hidden": "true", hidden: true });
  const button = (text, label, act) =>
    element("button", { type: "button", title: label, "aria-label": label, onclick: act }, text);
  const select = (label, act) =>
    element("select", { "aria-label": label, onchange: (event) => act(event.target.value) });
  const stats = select("what a pixel stands for", (stat) => send("set", { stat }));
  const choices = select("whose values are shown", (choice) => send("set", { choice }));
  const down = select("dim that runs down", () => turn());
  const across = select("dim that runs across", () => turn());
  const dims = element("span", { hidden: true }, down, " × ", across);
  const hold = button("hold colours", "keep this scale of colours while zooming", () =>
    send("set", { hold: !frame.held }),
  );
  const showBars = button("histogram", "show how the values of the region are spread", () => {
    bars.hidden = !bars.hidden;
    showBars.setAttribute("aria-pressed", String(!bars.hidden));
    if (!bars.hidden) send("histogram", { asker });
    layOut();
  });
  showBars.setAttribute("aria-pressed", "false");
  const zoomBar = element(
    "span",
    { class: "dl-plot-zoom", role: "group", "aria-label": "zoom" },
    button("−", "zoom out (-)", () => zoomBy(0.5)),
    button("+", "zoom in (+)", () => zoomBy(2)),
    button("all", "show all (0)", () => fit()),
  );
  const reload = button("↻", "read again (r)", () => send("again"));
  const sliders = element("span", { class: "dl-plot-bar", hidden: true });
  const barCanvas = element("canvas", { role: "img" });
  const barWords = element("div", { class: "dl-plot-note" });
  const bars = element("div", { class: "dl-plot-histogram", hidden: true }, barCanvas, barWords);
  const stage = element("div", { class: "dl-plot-stage" }, canvas, bars);
  root.classList.add("dl-plot");
  root.append(
    title,
    element("div", { class: "dl-plot-bar" }, zoomBar, stats, choices, dims, hold, showBars, reload),
    sliders,
    note,
    stage,
    element("div", { class: "dl-plot-legend" }, low, swatch, high, loud, bad),
    readout,
  );

  // -- the view --------------------------------------------------------------------------------

  const flat = () => frame.size[0] === 1;
  function extent(zoom = view.zoom) {
    const [tall, wide] = frame.size;
    return {
      tall: flat() ? 1 : Math.max(tall / zoom, Math.min(tall, area.height / (LARGEST * 0.5))),
      wide: Math.max(wide / zoom, Math.min(wide, area.width / LARGEST)),
    };
  }
  const mostZoom = () =>
    Math.max((frame.size[1] * LARGEST) / area.width, (frame.size[0] * LARGEST) / 2 / area.height, 1);
  function clamp() {
    view.zoom = Math.min(Math.max(view.zoom, 1), mostZoom());
    const { tall, wide } = extent();
    view.top = Math.min(Math.max(view.top, 0), frame.size[0] - tall);
    view.left = Math.min(Math.max(view.left, 0), frame.size[1] - wide);
  }
  function fit() {
    view = { top: 0, left: 0, zoom: 1 };
    moved();
  }
  function zoomBy(factor, row, column) {
    const before = extent();
    if (row == null) {
      const inside =
        cursor && cursor[0] >= view.top && cursor[0] <= view.top + before.tall &&
        cursor[1] >= view.left && cursor[1] <= view.left + before.wide;
      row = inside ? cursor[0] + 0.5 : view.top + before.tall / 2;
      column = inside ? cursor[1] + 0.5 : view.left + before.wide / 2;
    }
    const was = view.zoom;
    view.zoom = Math.min(Math.max(was * factor, 1), mostZoom());
    const after = extent();
    view.top = row - ((row - view.top) / before.tall) * after.tall;
    view.left = column - ((column - view.left) / before.wide) * after.wide;
    moved();
    return view.zoom !== was;
  }
  function moved() {
    clamp();
    paint();
    clearTimeout(settling);
    settling = setTimeout(look, SETTLE);
  }
  function look() {
    if (!frame || !view || area.width < 2) return;
    if (waiting && performance.now() - waiting < WAIT) {
      again = true;
      return;
    }
    again = false;
    waiting = performance.now();
    numbers += 1;
    const { tall, wide } = extent();
    send("look", {
      asker,
      number: numbers,
      window: [
        Math.floor(view.top), Math.floor(view.left),
        Math.ceil(view.top + tall - 1e-6), Math.ceil(view.left + wide - 1e-6),
      ],
      pixels: [Math.round(area.height), Math.round(area.width)],
    });
  }
  function turn() {
    const chosen = [Number(down.value), Number(across.value)];
    if (chosen[0] === chosen[1]) chosen[chosen[0] === frame.dims[0] ? 1 : 0] =
      frame.dims[chosen[0] === frame.dims[0] ? 0 : 1];
    if (chosen[0] === chosen[1]) chosen[0] = frame.dims[1];
    send("set", { dims: chosen });
  }

  // -- what comes --------------------------------------------------------------------------------

  function take(said) {
    const [rows, columns] = said.pixels;
    const levels = Uint8Array.from(atob(said.levels), (char) => char.charCodeAt(0));
    const map = frame.maps[String(said.diverging)];
    const image = new ImageData(columns, rows);
    const broken = [];
    for (let i = 0; i < levels.length; i += 1) {
      const at = 6 * levels[i];
      for (let part = 0; part < 3; part += 1)
        image.data[4 * i + part] = parseInt(map.slice(at + 2 * part, at + 2 * part + 2), 16);
      image.data[4 * i + 3] = 255;
      if (levels[i] === 255 && said.nonfinite && frame.stat !== "nonfinite") broken.push(i);
    }
    const bitmap = document.createElement("canvas");
    bitmap.width = columns;
    bitmap.height = rows;
    bitmap.getContext("2d").putImageData(image, 0, 0);
    return { ...said, bitmap, broken, light: levels };
  }
  function message(said) {
    if (said.asker !== asker) return;
    if (said.type === "point") {
      if (cursor && said.at[0] === cursor[0] && said.at[1] === cursor[1])
        readout.textContent = said.words;
      return;
    }
    if (said.type === "histogram") return drawBars(said);
    waiting = 0;
    if (said.type === "picture" && said.number === numbers) {
      const picture = take(said);
      const whole =
        said.window[0] === 0 && said.window[1] === 0 &&
        said.window[2] === frame.size[0] && said.window[3] === frame.size[1];
      pictures = whole ? [picture] : [...pictures.slice(0, 1), picture];
      if (!whole && pictures.length === 2 && pictures[0].partly) pictures.shift();
      if (!whole && pictures.length === 1) picture.partly = true;
      low.textContent = said.low;
      high.textContent = said.high;
      swatch.style.background = frame.gradients[String(said.diverging)];
      const counted = said.nonfinite && frame.stat !== "nonfinite";
      bad.hidden = loud.hidden = !counted;
      if (counted) bad.textContent =
        `${said.nonfinite} ${said.nonfinite === 1 ? "pixel" : "pixels"} not finite`;
      note.textContent = [said.words, ...frame.others, ...said.problems].join(" · ");
      canvas.setAttribute(
        "aria-label",
        `${frame.title}: ${said.words}, ${said.low} to ${said.high}` +
          (said.nonfinite ? `, ${said.nonfinite} not finite` : ""),
      );
      paint();
      point();
      if (!bars.hidden) send("histogram", { asker });
    }
    if (again) look();
  }
  function point() {
    if (!cursor) return;
    clearTimeout(pointing);
    pointing = setTimeout(() => send("point", { asker, at: cursor }), 30);
  }

  // -- drawing -----------------------------------------------------------------------------------

  const x = (column) => area.left + ((column - view.left) / extent().wide) * area.width;
  const y = (row) =>
    flat() ? area.top + row * area.height
      : area.top + ((row - view.top) / extent().tall) * area.height;
  const place = ([top, left, bottom, right]) => [
    x(left), y(top), x(right) - x(left), y(bottom) - y(top),
  ];

  function layOut() {
    if (!frame) return;
    const beside = !bars.hidden && stage.clientWidth >= 560 ? 240 : 0;
    const room = Math.min(Math.max(Math.floor(stage.clientWidth) - beside, 160), 760);
    const left = 58;
    const inner = room - left - 12;
    const height = flat() ? 34 : Math.min(Math.max(Math.round(inner / frame.ratio), 90), 440);
    area = { left, top: 8, width: inner, height };
    if (!flat()) area.width = Math.min(inner, Math.round(height * Math.max(frame.ratio, 0.5)));
    const width = left + area.width + 12;
    const total = height + 46 + (flat() ? 140 : 0);
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${total}px`;
    canvas.style.width = `${width}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(total * scale);
    canvas.dataset.scale = scale;
    if (view) clamp();
    paint();
  }
  function paint() {
    if (!drawing) drawing = requestAnimationFrame(draw);
  }
  function draw() {
    drawing = 0;
    if (!frame || !view) return;
    const context = canvas.getContext("2d");
    const scale = Number(canvas.dataset.scale) || 1;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    const style = getComputedStyle(root);
    const ink = style.color;
    const paper = style.getPropertyValue("--jp-layout-color0").trim() || "Canvas";
    context.font = `11px ${style.fontFamily}`;
    context.save();
    context.beginPath();
    context.rect(area.left, area.top, area.width, area.height);
    context.clip();
    drawShards(context);
    for (const picture of pictures) drawPicture(context, picture);
    outline(context, ink, paper);
    drawCursor(context);
    context.restore();
    context.strokeStyle = ink;
    context.globalAlpha = 0.35;
    context.strokeRect(area.left - 0.5, area.top - 0.5, area.width + 1, area.height + 1);
    context.globalAlpha = 1;
    axes(context, ink);
    if (flat()) drawLine(context, ink);
  }
  function drawShards(context) {
    context.fillStyle = hatch(context, "rgba(128,128,128,0.12)", "rgba(128,128,128,0.45)");
    for (const shard of frame.shards) context.fillRect(...place(shard.place));
  }
  function drawPicture(context, picture) {
    const [rows, columns] = picture.pixels;
    const [top, left] = picture.origin;
    const [tall, wide] = picture.blocks;
    context.imageSmoothingEnabled = false;
    context.save();
    context.beginPath();
    for (const shown of picture.shown) context.rect(...place(shown));
    context.clip();
    context.drawImage(
      picture.bitmap, 0, 0, columns, rows,
      ...place([top, left, top + rows * tall, left + columns * wide]),
    );
    const cellWidth = x(left + wide) - x(left);
    const cellHeight = y(top + tall) - y(top);
    const loudness = hatch(context, LOUD, "#3a002e");
    context.fillStyle = loudness;
    context.strokeStyle = "#3a002e";
    for (const i of picture.broken.slice(0, 4000)) {
      const column = x(left + (i % columns) * wide);
      const row = y(top + Math.floor(i / columns) * tall);
      const size = [Math.max(cellWidth, 6), Math.max(cellHeight, 6)];
      const at = [column + cellWidth / 2 - size[0] / 2, row + cellHeight / 2 - size[1] / 2];
      context.fillRect(...at, ...size);
      context.strokeRect(...at, ...size);
    }
    if (picture.texts && cellWidth >= 40 && cellHeight >= 15) writeValues(context, picture);
    context.restore();
  }
  function writeValues(context, picture) {
    context.textAlign = "center";
    context.textBaseline = "middle";
    const map = frame.maps[String(picture.diverging)];
    picture.texts.forEach((line, row) =>
      line.forEach((text, column) => {
        const at = 6 * picture.light[row * line.length + column];
        const [red, green, blue] = [0, 2, 4].map((k) => parseInt(map.slice(at + k, at + k + 2), 16));
        const [px, py, width, height] = place([
          picture.origin[0] + row, picture.origin[1] + column,
          picture.origin[0] + row + 1, picture.origin[1] + column + 1,
        ]);
        const dark = 0.3 * red + 0.59 * green + 0.11 * blue < 128;
        context.fillStyle = dark || at === 6 * 255 ? "#fff" : "#000";
        context.fillText(text, px + width / 2, py + height / 2, width - 4);
      }),
    );
  }
  function outline(context, ink, paper) {
    const states = pictures.length ? pictures[pictures.length - 1].states : {};
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const shard of frame.shards) {
      const [left, top, width, height] = place(shard.place);
      const inset = width > 8 && height > 8 ? 1.5 : 0.5;
      for (const [colour, size] of [[paper, 4], [shard.colour, 2.4]]) {
        context.strokeStyle = colour;
        context.lineWidth = size;
        context.strokeRect(left + inset, top + inset, width - 2 * inset, height - 2 * inset);
      }
      context.lineWidth = 1;
      const seen = {
        left: Math.max(left, area.left), top: Math.max(top, area.top),
        right: Math.min(left + width, area.left + area.width),
        bottom: Math.min(top + height, area.top + area.height),
      };
      const silent = shard.members.find((rank) => states[rank]);
      const alone = shard.members.length === 1;
      const state = silent == null ? "" : alone ? states[silent] : `${silent} ${states[silent]}`;
      const room = seen.right - seen.left - 16;
      const long = flat() ? shard.owner : `${shard.owner} ${shard.label}`;
      const words = [long, shard.owner, shard.ranks].map((text) =>
        state ? `${text}: ${state}` : text,
      );
      const text = [...words, shard.ranks].find((t) => context.measureText(t).width <= room);
      if (!text || seen.bottom - seen.top < 20) continue;
      context.fillStyle = paper;
      context.globalAlpha = 0.88;
      context.fillRect(seen.left + 4, seen.top + 4, context.measureText(text).width + 8, 15);
      context.globalAlpha = 1;
      context.fillStyle = shard.colour;
      context.fillRect(seen.left + 4, seen.top + 4, 3, 15);
      context.fillStyle = ink;
      context.fillText(text, seen.left + 10, seen.top + 12);
    }
  }
  function drawCursor(context) {
    const last = pictures[pictures.length - 1];
    if (!cursor || !last) return;
    const [tall, wide] = last.blocks;
    const row = Math.floor(cursor[0] / tall) * tall;
    const column = Math.floor(cursor[1] / wide) * wide;
    const [left, top, width, height] = place([row, column, row + tall, column + wide]);
    const size = [Math.max(width, 7), Math.max(height, 7)];
    const at = [left + width / 2 - size[0] / 2, top + height / 2 - size[1] / 2];
    for (const [colour, thick] of [["#fff", 4], ["#000", 2]]) {
      context.strokeStyle = colour;
      context.lineWidth = thick;
      context.strokeRect(...at, ...size);
    }
    context.lineWidth = 1;
  }
  function axes(context, ink) {
    context.fillStyle = ink;
    context.strokeStyle = ink;
    const base = area.top + area.height;
    const { tall, wide } = extent();
    context.textAlign = "center";
    context.textBaseline = "top";
    const digits = String(frame.size[1]).length * 7 + 18;
    const starts = frame.joined
      ? [[0, frame.size[1]]]
      : frame.shards.map((shard) => [shard.place[1], shard.place[3]]);
    const step = tickStep(wide, area.width, Math.max(digits, 44));
    for (const [start, end] of starts) {
      const first = Math.max(Math.ceil((view.left - start) / step), 0);
      for (let k = first; start + k * step < Math.min(end, view.left + wide + 1e-9); k += 1) {
        const at = x(start + k * step);
        context.fillRect(Math.round(at), base + 1, 1, 5);
        context.fillText(String(k * step), at, base + 8);
      }
    }
    const bottom = base + (flat() ? 160 : 22);
    context.textAlign = "left";
    context.globalAlpha = 0.75;
    if (frame.axes[1]) context.fillText(`${frame.axes[1]} →`, area.left, bottom);
    const bar = tickStep(wide, area.width, 60);
    const length = (bar / wide) * area.width;
    if (!flat() && length < area.width * 0.7) {
      const right = area.left + area.width;
      context.fillRect(right - length, bottom + 6, length, 2);
      context.fillRect(right - length, bottom + 3, 1, 8);
      context.fillRect(right - 1, bottom + 3, 1, 8);
      context.textAlign = "right";
      const unit = bar === 1 ? "element" : "elements";
      context.fillText(`${bar} ${unit}`, right - length - 6, bottom + 1);
    }
    context.globalAlpha = 1;
    if (flat() || frame.dims[0] < 0) return;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const rows = tickStep(tall, area.height, 26);
    for (let row = Math.ceil(view.top / rows) * rows; row < view.top + tall; row += rows) {
      const at = y(row);
      context.fillRect(area.left - 6, Math.round(at), 5, 1);
      context.fillText(String(row), area.left - 9, Math.min(at + 4, base - 4));
    }
    context.save();
    context.translate(9, area.top + area.height / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.globalAlpha = 0.75;
    context.fillText(`← ${frame.axes[0]}`, 0, 0);
    context.restore();
  }
  function drawLine(context, ink) {
    const picture = pictures[pictures.length - 1];
    if (!picture || !picture.line) return;
    const { mean, low: lows, high: highs } = picture.line;
    const ends = [...lows, ...highs].filter((value) => value != null);
    if (!ends.length) return;
    let [least, most] = [Math.min(...ends), Math.max(...ends)];
    if (least === most) [least, most] = [least - 1, most + 1];
    const box = { top: area.top + area.height + 30, height: 120 };
    const py = (value) => box.top + (1 - (value - least) / (most - least)) * box.height;
    const px = (i) => x(picture.origin[1] + (i + 0.5) * picture.blocks[1]);
    context.save();
    context.beginPath();
    context.rect(area.left, box.top - 2, area.width, box.height + 4);
    context.clip();
    for (const shard of frame.shards) {
      const [left, , width] = place(shard.place);
      context.fillStyle = shard.colour;
      context.globalAlpha = 0.14;
      context.fillRect(left, box.top, width, box.height);
    }
    context.globalAlpha = 0.3;
    context.fillStyle = ink;
    const width = Math.max(x(picture.blocks[1]) - x(0), 1);
    lows.forEach((value, i) => {
      if (value != null)
        context.fillRect(px(i) - width / 2, py(highs[i]), width, Math.max(py(value) - py(highs[i]), 1));
    });
    context.globalAlpha = 1;
    context.strokeStyle = ink;
    context.lineWidth = 1.5;
    context.beginPath();
    let pen = false;
    mean.forEach((value, i) => {
      if (value == null) pen = false;
      else {
        context[pen ? "lineTo" : "moveTo"](px(i), py(value));
        pen = true;
      }
    });
    context.stroke();
    context.restore();
    context.lineWidth = 1;
    context.fillStyle = ink;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of [least, (least + most) / 2, most])
      context.fillText(String(Number(value.toPrecision(3))), area.left - 6, py(value), area.left - 8);
    context.globalAlpha = 0.35;
    context.strokeStyle = ink;
    context.strokeRect(area.left - 0.5, box.top - 0.5, area.width + 1, box.height + 1);
    context.globalAlpha = 1;
  }
  function drawBars(said) {
    const scale = window.devicePixelRatio || 1;
    barCanvas.width = 220 * scale;
    barCanvas.height = 150 * scale;
    const context = barCanvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(root);
    context.font = `11px ${style.fontFamily}`;
    context.fillStyle = style.color;
    const most = Math.max(...said.counts, 1);
    said.counts.forEach((count, i) => {
      const height = count ? Math.max((count / most) * 122, 1) : 0;
      context.globalAlpha = 0.7;
      context.fillRect(4 + i * 9, 128 - height, 8, height);
    });
    context.globalAlpha = 1;
    context.fillRect(4, 128, 215, 1);
    context.textBaseline = "top";
    context.fillText(said.low, 4, 133);
    context.textAlign = "right";
    context.fillText(said.high, 218, 133);
    barWords.textContent = `histogram ${said.words}; highest bar ${most.toLocaleString("en")}`;
    barCanvas.setAttribute(
      "aria-label",
      `${barWords.textContent}; ${said.low} to ${said.high}: ${said.counts.join(", ")}`,
    );
  }

  // -- hands ---------------------------------------------------------------------------------------

  function elementAt(event) {
    const box = canvas.getBoundingClientRect();
    const { tall, wide } = extent();
    const across = (event.clientX - box.left - area.left) / area.width;
    const downwards = (event.clientY - box.top - area.top) / area.height;
    return {
      inside: across >= 0 && across < 1 && downwards >= 0 && downwards < 1,
      row: flat() ? 0 : view.top + downwards * tall,
      column: view.left + across * wide,
    };
  }
  function setCursor(row, column) {
    const next = [
      Math.min(Math.max(Math.floor(row), 0), frame.size[0] - 1),
      Math.min(Math.max(Math.floor(column), 0), frame.size[1] - 1),
    ];
    if (cursor && next[0] === cursor[0] && next[1] === cursor[1]) return;
    cursor = next;
    const shard = frame.shards.find(({ place: [top, left, bottom, right] }) =>
      next[0] >= top && next[0] < bottom && next[1] >= left && next[1] < right);
    const at = [...frame.index];
    const from = shard && !frame.joined ? [shard.place[0], shard.place[1]] : [0, 0];
    frame.dims.forEach((dim, axis) => {
      if (dim >= 0) at[dim] = next[axis] - from[axis];
    });
    readout.textContent = shard ? `[${at.join(", ")}] · ${shard.owner} · …` : "between the tensors";
    paint();
    point();
  }
  canvas.addEventListener("wheel", (event) => {
    const at = elementAt(event);
    if (!at.inside) return;
    const steps = event.deltaMode === 1 ? event.deltaY * 30 : event.deltaY;
    if (zoomBy(2 ** (-steps / 240), at.row, at.column) || view.zoom > 1) event.preventDefault();
    const now = elementAt(event);
    setCursor(now.row, now.column);
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => {
    const at = elementAt(event);
    if (at.inside) zoomBy(event.shiftKey ? 0.5 : 2, at.row, at.column);
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { ...elementAt(event) };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!frame || !view) return;
    const at = elementAt(event);
    if (drag && event.buttons) {
      canvas.classList.add("dl-plot-drag");
      view.top -= at.row - drag.row;
      view.left -= at.column - drag.column;
      moved();
    } else if (at.inside) setCursor(at.row, at.column);
  });
  const drop = () => {
    drag = null;
    canvas.classList.remove("dl-plot-drag");
  };
  canvas.addEventListener("pointerup", drop);
  canvas.addEventListener("pointercancel", drop);
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !view) return;
    const ways = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const acts = { "+": () => zoomBy(2), "=": () => zoomBy(2), "-": () => zoomBy(0.5), 0: fit,
      r: () => send("again") };
    if (ways[event.key]) {
      const { tall, wide } = extent();
      const last = pictures[pictures.length - 1];
      const blocks = (last ? last.blocks : [1, 1]).map((n) => n * (event.shiftKey ? 10 : 1));
      const from = cursor || [view.top + tall / 2, view.left + wide / 2];
      const [row, column] = ways[event.key].map((way, axis) => from[axis] + way * blocks[axis]);
      setCursor(row, column);
      if (cursor[0] < view.top) view.top = cursor[0];
      if (cursor[0] + 1 > view.top + tall) view.top = cursor[0] + 1 - tall;
      if (cursor[1] < view.left) view.left = cursor[1];
      if (cursor[1] + 1 > view.left + wide) view.left = cursor[1] + 1 - wide;
      moved();
    } else if (acts[event.key]) acts[event.key]();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  // -- options -------------------------------------------------------------------------------------

  function fill(menu, options, chosen) {
    if (menu.dataset.options !== JSON.stringify(options)) {
      menu.dataset.options = JSON.stringify(options);
      menu.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
    }
    menu.value = chosen;
  }
  function fillSliders() {
    const others = frame.shape.map((size, dim) => [dim, size])
      .filter(([dim]) => !frame.dims.includes(dim));
    sliders.hidden = !others.length;
    const key = JSON.stringify(others);
    if (sliders.dataset.key !== key) {
      sliders.dataset.key = key;
      sliders.replaceChildren(...others.map(([dim, size]) => {
        const move = (event) => {
          const index = [...frame.index];
          index[dim] = Math.min(Math.max(Math.round(Number(event.target.value)), 0), size - 1);
          send("set", { index });
        };
        const common = { min: 0, max: size - 1, "data-dim": dim };
        return element("label", {}, `dim ${dim}`,
          element("input", { type: "range", "aria-label": `index of dim ${dim}`, oninput: move, ...common }),
          element("input", { type: "number", "aria-label": `index of dim ${dim}, as a number`, onchange: move, ...common }),
          `of ${size}`);
      }));
    }
    for (const input of sliders.querySelectorAll("input"))
      if (input !== document.activeElement) input.value = frame.index[Number(input.dataset.dim)];
  }
  function update(next) {
    if (!next || !next.size) return;
    const before = frame;
    frame = next;
    title.textContent = frame.title;
    if (frame.gone) note.textContent = frame.gone;
    fill(stats, frame.stats.map((stat) => [stat, { mean: "mean", absmax: "largest magnitude",
      nonfinite: "non-finite count" }[stat]]), frame.stat);
    fill(choices, frame.choices, frame.choice);
    choices.hidden = frame.choices.length < 2;
    dims.hidden = frame.shape.length < 3;
    const all = frame.shape.map((size, dim) => [String(dim), `dim ${dim}`]);
    fill(down, all, String(frame.dims[0]));
    fill(across, all, String(frame.dims[1]));
    fillSliders();
    hold.setAttribute("aria-pressed", String(frame.held));
    const other = !before || String(before.size) !== String(frame.size) ||
      String(before.dims) !== String(frame.dims);
    if (other) {
      numbers += 1; // what is on its way is of the old sheet
      pictures = [];
      cursor = null;
      readout.textContent = "wheel or + and - zoom, drag moves, arrow keys move the cursor";
      view = { top: 0, left: 0, zoom: 1 };
      layOut();
    }
    if (other || before.version !== frame.version) {
      if (waiting) again = true;
      look();
    }
  }

  const sizes = new ResizeObserver(() => {
    layOut();
    moved();
  });
  sizes.observe(stage);
  const themes = new MutationObserver(paint);
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  return {
    update,
    message,
    stop() {
      sizes.disconnect();
      themes.disconnect();
      clearTimeout(settling);
      clearTimeout(pointing);
      cancelAnimationFrame(drawing);
    },
  };
}

export default { render: disco(plotView) };
