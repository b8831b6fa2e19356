// The source of a program: its lines, coloured, with breakpoints and the places of workers.

const MOST_CHIPS = 8;
const KEYWORDS = new Set(("and as assert async await break case class continue def del elif else "
  + "except finally for from global if import in is lambda match nonlocal not or pass raise return "
  + "try while with yield").split(" "));
const CONSTANTS = new Set(["None", "True", "False", "self", "cls"]);
const TOKEN = /("""|''')|(#.*)|((?:[rbfuRBFU]{0,2})(?:"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?))|(@[\w.]+)|(\d[\w.]*)|([\p{L}_][\p{L}\p{N}_]*)/gu;

// Pieces [class, text] of each line of Python; enough for colours, not a parser.
function coloured(lines) {
  let open = ""; // the quotes of a string that goes on
  return lines.map((line) => {
    const pieces = [];
    const add = (kind, text) => text && pieces.push([kind, text]);
    let at = 0, after = "";
    const string = (from) => {
      const end = line.indexOf(open, from);
      const stop = end < 0 ? line.length : end + 3;
      if (end >= 0) open = "";
      return stop;
    };
    if (open) add("string", line.slice(0, (at = string(0))));
    TOKEN.lastIndex = at;
    for (let found; (found = TOKEN.exec(line)); ) {
      const [text, triple, comment, quoted, decorator, number, word] = found;
      add("", line.slice(at, found.index));
      at = found.index + text.length;
      if (triple) {
        open = triple;
        at = string(found.index + 3);
        add("string", line.slice(found.index, at));
        TOKEN.lastIndex = at;
      } else if (comment) add("comment", text);
      else if (quoted) add("string", text);
      else if (decorator) add("defined", text);
      else if (number) add("num", text);
      else if (KEYWORDS.has(word)) add("keyword", text);
      else if (CONSTANTS.has(word)) add("num", text);
      else add(after === "def" || after === "class" ? "defined" : "", text);
      if (word) after = word;
    }
    add("", line.slice(at));
    return pieces;
  });
}

// Neighbouring ranks as one chip each while they are few, else as runs: 0-5.
function chips(ranks, colours, all) {
  const box = element("span", { class: "dls-chips" });
  const runs = [];
  const single = ranks.length <= 4;
  for (const rank of ranks) {
    const last = runs.at(-1);
    if (!single && last && last[1] === rank - 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  for (const [first, last] of runs.slice(0, MOST_CHIPS))
    box.append(element("span", {
      class: "dls-chip", style: `--rank: ${colours[first] ?? "currentColor"}`,
    }, first === last ? String(first) : `${first}–${last}`));
  if (runs.length > MOST_CHIPS) box.append("…");
  const named = ranks.length === all ? "all workers" : `worker${ranks.length > 1 ? "s" : ""} ${ranks.join(", ")}`;
  box.title = named;
  return box;
}

function startSource(onToggle) {
  const name = element("span", { class: "dls-file" });
  const where = element("span", { class: "dls-muted" });
  const head = element("div", { class: "dls-source-head" }, name, where);
  const table = element("div", { class: "dls-lines", role: "table", "aria-label": "source" });
  const body = element("div", { class: "dls-code" }, table);
  const node = element("div", { class: "dls-source" }, head, body);
  let lines = new Map(), shown = "", marked = "", seen = "";

  function build(source) {
    lines = new Map();
    const pieces = coloured(source.lines);
    table.replaceChildren(...pieces.map((line, i) => {
      const number = source.first + i;
      const dot = element("button", {
        class: "dls-gutter", tabindex: "-1", type: "button",
        "aria-label": `breakpoint at line ${number}`,
        onclick: () => onToggle(source.file, number),
      }, element("span", { class: "dls-dot" }), String(number));
      const who = element("span", { class: "dls-who", role: "cell" });
      const text = element("span", { class: "dls-text", role: "cell" },
        ...line.map(([kind, words]) => (kind ? element("span", { class: `dls-${kind}` }, words) : words)));
      const row = element("div", { class: "dls-line", role: "row" },
        element("span", { role: "cell", class: "dls-number" }, dot), who, text);
      lines.set(number, { row, dot, who });
      return row;
    }));
  }

  function mark(source, colours) {
    // as wide as it was for most workers, so that the code stays where it is; 0 once nobody stands
    const most = Object.keys(source.marks).length ? Math.min(4, source.widest) : 0;
    body.style.setProperty("--who", `${most * 20 + 4}px`);
    for (const [number, { row, dot, who }] of lines) {
      const marks = source.marks[number] ?? [];
      const stop = source.breaks[number];
      const looks = marks.map(([look]) => look);
      row.className = "dls-line" + (looks.length ? ` dls-at dls-at-${looks[0]}` : "")
        + (number === source.line ? " dls-here" : "");
      dot.classList.toggle("dls-set", stop !== undefined);
      dot.classList.toggle("dls-if", !!stop);
      dot.setAttribute("aria-pressed", String(stop !== undefined));
      dot.title = stop === undefined ? `set a breakpoint at line ${number}`
        : `remove the breakpoint${stop ? ` (${stop})` : ""}`;
      if (who.firstChild || marks.length)
        who.replaceChildren(...marks.map(([look, ranks]) => {
          const box = chips(ranks, colours, Object.keys(colours).length);
          box.classList.add(`dls-look-${look}`);
          return box;
        }));
    }
  }

  // Have the line in sight; the notebook around it does not move.
  function reveal(number) {
    const row = lines.get(number)?.row;
    if (!row) return;
    const margin = 3 * row.offsetHeight;
    const top = row.getBoundingClientRect().top - body.getBoundingClientRect().top + body.scrollTop;
    if (top - margin < body.scrollTop) body.scrollTop = top - margin;
    else if (top + row.offsetHeight + margin > body.scrollTop + body.clientHeight)
      body.scrollTop = top + row.offsetHeight + margin - body.clientHeight;
  }

  return {
    node,
    update(source, colours) {
      node.hidden = !source;
      if (!source) return;
      setText(name, source.name);
      setText(where, source.function);
      const text = JSON.stringify([source.file, source.first, source.lines]);
      const fresh = text !== shown;
      if (fresh) build(source);
      shown = text;
      const now = JSON.stringify([source.marks, source.breaks, source.line, source.widest, colours]);
      if (fresh || now !== marked) mark(source, colours);
      marked = now;
      const place = `${source.file}:${source.line}`;
      if (fresh || place !== seen) reveal(source.line);
      seen = place;
    },
  };
}
