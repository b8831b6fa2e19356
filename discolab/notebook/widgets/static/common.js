// Shared by all live views; each view's own file follows in the same module.
//
// `export default { render: disco(start) }`, where `start(root, send, model)` draws into `root` and
// gives { update(frame), message?(content), stop?() }. `send(name, content)` is a command to the kernel.

const ALIVE_EVERY = 20000; // ms between two signs of life
const ERROR_FOR = 8000; // ms for which an error is shown

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  // else Notebook 7 takes the keys that are pressed in it for its own; an ancestor's does not count
  if (tag === "button" || "tabindex" in attributes)
    made.setAttribute("data-lm-suppress-shortcuts", "true");
  made.append(...children.filter((child) => child != null));
  return made;
}

// Leaves a node alone that says so already: what is selected in it stays selected.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A worker, in its colour.
function chip(rank, colour) {
  return element("span", { class: "dl-chip", style: `--rank: ${colour}` }, String(rank));
}

function disco(start) {
  return function render({ model, el }) {
    const viewer = Math.random().toString(36).slice(2);
    const root = element("div", { class: "dl-live" });
    const error = element("div", { class: "dl-error", role: "alert", hidden: true });
    el.append(root, error);

    // The static picture is for saved notebooks: hidden while this one is here.
    const hide = element("style");
    const key = CSS.escape(model.get("key"));
    hide.textContent = `.${key}, .jp-OutputArea-child:has(.${key}) { display: none !important; }`;
    document.head.append(hide);

    let fading = 0;
    const fail = (text) => {
      error.textContent = text;
      error.hidden = false;
      clearTimeout(fading);
      fading = setTimeout(() => (error.hidden = true), ERROR_FOR);
    };
    const tell = (content) => {
      try {
        model.send({ ...content, viewer });
      } catch {
        gone();
      }
    };
    const say = (type) => tell({ type });
    const send = (name, content = {}) => tell({ ...content, type: "command", name });
    const gone = () => {
      root.classList.add("dl-gone");
      clearTimeout(fading);
      error.textContent = "the kernel has gone: this is the last picture";
      error.hidden = false;
    };
    const view = start(root, send, model);

    let due = 0;
    const draw = () => {
      due = 0;
      try {
        view.update(model.get("frame"));
      } catch (fault) {
        fail(`this view could not be drawn: ${fault}`);
        console.error(fault);
      }
    };
    const schedule = () => {
      if (!due) due = requestAnimationFrame(draw);
    };
    const heard = (content) => {
      if (content.type === "error") fail(content.text);
      else if (view.message) view.message(content);
    };
    const seen = () => say(document.hidden ? "close" : "open");

    model.on("comm_live_update", gone);
    model.on("change:frame", schedule);
    model.on("msg:custom", heard);
    document.addEventListener("visibilitychange", seen);
    const beat = setInterval(() => document.hidden || say("alive"), ALIVE_EVERY);
    say("open");
    draw();

    return () => {
      model.off("comm_live_update", gone);
      model.off("change:frame", schedule);
      model.off("msg:custom", heard);
      document.removeEventListener("visibilitychange", seen);
      clearInterval(beat);
      cancelAnimationFrame(due);
      hide.remove();
      tell({ type: "close", gone: true });
      if (view.stop) view.stop();
    };
  };
}
