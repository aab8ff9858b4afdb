// Search runs in a worker, which browsers do not start for pages from disk. There a hidden frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.window = frame.contentWindow;
      this.window.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      this.isLoaded = new Promise((resolve) => script.addEventListener("load", resolve));
      frame.contentDocument.head.append(script);
    }

    postMessage(data) {
      this.isLoaded.then(() => this.window.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
