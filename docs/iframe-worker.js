// Browsers start no worker from a file, and the theme searches in one. On pages from a disk, a frame does its work.
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(script) {
    super();
    const frame = document.body.appendChild(document.createElement("iframe"));
    frame.hidden = true;
    this.inside = frame.contentWindow;
    this.inside.document.open();
    this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.loaded = new Promise((resolve) => { this.inside.onload = resolve; });
    this.inside.document.write(`<script src="${script}"></script>`);
    this.inside.document.close();
  }
  postMessage(data) { this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data }))); }
};
