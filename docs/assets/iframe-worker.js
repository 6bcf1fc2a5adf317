// Browsers make no Worker for a page that was opened from a folder (file://).  There, the script of
// the search runs in a hidden frame instead, with the messages of a Worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      addEventListener("message", (event) => {
        if (event.source === inside) {
          const message = new MessageEvent("message", { data: event.data });
          this.dispatchEvent(message);
          if (this.onmessage) this.onmessage(message);
        }
      });
      this.ready = new Promise((resolve) => {
        inside.document.open();
        // importScripts: one script after the other, as in a Worker.
        inside.document.write(`<!doctype html><script>
          var postMessage = (data) => parent.postMessage(data, "*");
          var importScripts = (...urls) => urls.reduce((before, url) => before.then(() =>
            new Promise((resolve, reject) => {
              const script = document.createElement("script");
              script.src = url;
              script.onload = resolve;
              script.onerror = reject;
              document.body.appendChild(script);
            })), Promise.resolve());
        </scr` + `ipt><body></body>`);
        inside.document.close();
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        inside.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => {
        const inside = this.frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", { data, source: window }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
}
