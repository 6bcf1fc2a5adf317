/* Draws the charts of a report from the numbers that lie in the page.  Text only ever gets into the
   page as text (textContent). */
(function () {
  "use strict";
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("report-data").textContent);
  const charts = [];
  const ink = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  // -- small things ------------------------------------------------------------------------------
  function element(tag, text, parent) {
    const one = document.createElement(tag);
    if (text !== undefined) one.textContent = text;
    if (parent) parent.append(one);
    return one;
  }

  const two = (value) => String(value).padStart(2, "0");
  const moment = (seconds) => new Date((seconds + (data.offset || 0)) * 1000);
  function clock(seconds, withDay) {
    const at = moment(seconds);
    const time = `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}:${two(at.getUTCSeconds())}`;
    const months = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(" ");
    return withDay ? `${at.getUTCDate()} ${months[at.getUTCMonth()]} ${time}` : time;
  }
  function span(seconds) {
    if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
    if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
    if (seconds < 99.5) return `${seconds.toFixed(0)} s`;
    if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
    if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
    return `${(seconds / 86400).toFixed(1)} d`;
  }
  function figure(value) {
    if (value === null || value === undefined) return "not finite";
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(+value.toPrecision(5));
  }
  function tip(host) {
    const box = element("div", undefined, host);
    box.className = "tip";
    box.hidden = true;
    return {
      hide() { box.hidden = true; },
      show(left, top, title, lines) {
        box.replaceChildren(element("b", title), ...lines.map((line) => element("div", line)));
        box.hidden = false;
        const wide = host.clientWidth;
        box.style.left = `${Math.max(0, Math.min(left + 14, wide - box.offsetWidth - 2))}px`;
        box.style.top = `${top + 16}px`;
      },
    };
  }
  const tzDate = (seconds) => uPlot.tzDate(moment(seconds), "Etc/UTC");
  const font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
  const DAY = "{D} {MMM}", TIME = "{HH}:{mm}";
  // How far ticks are apart, in seconds, their text, and what is added where a year, day, … begins.
  const DATES = [
    [31536000, "{YYYY}", null, null, null, null, null, null, 1],
    [2419200, "{MMM}", "\n{YYYY}", null, null, null, null, null, 1],
    [86400, DAY, "\n{YYYY}", null, null, null, null, null, 1],
    [60, TIME, `\n${DAY} {YYYY}`, null, `\n${DAY}`, null, null, null, 1],
    [1, ":{ss}", `\n${DAY} ${TIME}`, null, `\n${DAY} ${TIME}`, null, `\n${TIME}`, null, 1],
    [0.001, ":{ss}.{fff}", `\n${DAY} ${TIME}`, null, `\n${DAY} ${TIME}`, null, `\n${TIME}`, null, 1],
  ];
  const titled = (label) => ({ label, labelSize: 18, labelGap: 0, labelFont: font });
  const axis = (more) => Object.assign({
    stroke: () => ink("muted"), grid: { stroke: () => ink("grid"), width: 1 },
    ticks: { stroke: () => ink("grid"), width: 1, size: 4 }, font,
  }, more);
  function clipped(u, draw, above = 0) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - above, bbox.width, bbox.height + above);
    ctx.clip();
    draw(ctx, bbox, devicePixelRatio || 1);
    ctx.restore();
  }

  // -- zooming, by buttons, keys and drawing a range -----------------------------------------------
  function zoomable(host, chart, whole) {
    function set(min, max) {
      const [least, most] = whole();
      const wide = Math.min(max - min, most - least);
      const start = Math.max(least, Math.min(min, most - wide));
      chart.plot.setScale("x", { min: start, max: start + wide });
    }
    function scale(factor) {
      const { min, max } = chart.plot.scales.x;
      const middle = (min + max) / 2, half = (max - min) / 2 * factor;
      set(middle - half, middle + half);
    }
    function move(share) {
      const { min, max } = chart.plot.scales.x;
      set(min + (max - min) * share, max + (max - min) * share);
    }
    const acts = { in: () => scale(0.5), out: () => scale(2), all: () => set(...whole()) };
    for (const tools of document.querySelectorAll(`.tools[data-for="${host.id}"]`)) {
      tools.hidden = false;
      for (const button of tools.querySelectorAll("[data-zoom]")) button.onclick = () => acts[button.dataset.zoom]();
    }
    const keys = { "+": acts.in, "=": acts.in, "-": acts.out, "0": acts.all, ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2) };
    host.addEventListener("keydown", (event) => {
      if (keys[event.key] && !event.ctrlKey && !event.metaKey) { keys[event.key](); event.preventDefault(); }
    });
    host.addEventListener("dblclick", acts.all);
    return acts;
  }
  function fitted(host, chart, height) {
    new ResizeObserver(() => {
      const width = host.clientWidth;
      if (chart.plot && width > 0 && width !== chart.plot.width) chart.plot.setSize({ width, height: height() });
    }).observe(host);
  }

  // -- the timeline ----------------------------------------------------------------------------------
  const BELOW = new Set(["training", "program", "queue", "stopped"]);
  function timeline(host) {
    const begin = data.begin, end = Math.max(data.end, data.begin + 1);
    const use = (one) => data.uses[one[0]];
    const names = { startup: "first start", restart: "restart", training: "training", saving: "waiting for a save", program: "a command",
      repeated: "repeated steps", unsaved: "steps not saved, to be repeated", idle: "idle", shutdown: "shutdown", queue: "waiting to be started", stopped: "stopped" };
    const nodesOf = new Map(data.placed.map(([attempt, launch, nodes]) => [`${attempt}.${launch}`, nodes]));
    const lanes = [{ name: "run", spans: data.spans, marks: [] }];
    if (data.nodes.length > 1 || data.nodeMarks.length) {
      data.nodes.forEach((name) => lanes.push({ name, spans: [], marks: [] }));
      for (const one of data.spans) {
        for (const node of nodesOf.get(`${one[3]}.${one[4]}`) || []) {
          if (use(one) !== "queue" && use(one) !== "stopped") lanes[node + 1].spans.push(one);
        }
      }
      data.nodeMarks.forEach((mark) => lanes[mark[1] + 1].marks.push(mark));
    }
    const starts = new Map();
    for (const one of data.spans) {
      if (use(one) !== "queue" && use(one) !== "stopped") {
        const known = starts.get(one[3]);
        starts.set(one[3], known ? [Math.min(known[0], one[1]), Math.max(known[1], one[2])] : [one[1], one[2]]);
      }
    }
    const laneHeight = lanes.length > 20 ? 15 : 22;
    const height = () => 34 + 12 + (lanes.length - 1) * laneHeight + 46;
    // The first lane is as high as two: it has the numbers of the attempts in it.
    const weight = (lane) => (lane === 0 ? 2 : 1);
    const total = lanes.length + 1;
    const top = (lane) => (lane === 0 ? 0 : lane + 1) / total;
    function draw(u) {
      clipped(u, (ctx, bbox, ratio) => {
        const color = Object.fromEntries(data.uses.map((each) => [each, ink(each)]));
        const { min, max } = u.scales.x;
        const inSight = data.spans.filter((one) => begin + one[2] >= min && begin + one[1] <= max).length;
        // A loss that is too short for a pixel is widened to be seen, unless there are so many that
        // they would hide what the time really went into.
        const least = inSight < bbox.width / ratio / 6 ? 1.5 * ratio : 0;
        const marksInSight = data.nodeMarks.filter((mark) => begin + mark[3] >= min && begin + mark[2] <= max).length;
        const small = marksInSight > 40 ? 0.35 : 1;
        lanes.forEach((lane, index) => {
          const y = bbox.top + bbox.height * top(index), full = bbox.height * weight(index) / total;
          const pad = Math.max(1, full * 0.1);
          for (const above of [false, true]) {
            for (const one of lane.spans) {
              const what = use(one);
              if (BELOW.has(what) === above || begin + one[2] < min || begin + one[1] > max) continue;
              const left = u.valToPos(begin + one[1], "x", true), right = u.valToPos(begin + one[2], "x", true);
              const thin = what === "queue" || what === "stopped";
              ctx.fillStyle = color[what];
              const inset = thin ? full * 0.42 : pad;
              ctx.fillRect(left, y + inset, Math.max(right - left, above ? least : 0), full - 2 * inset);
            }
          }
          for (const [kind, , start, stop] of lane.marks) {
            const left = u.valToPos(begin + start, "x", true), right = u.valToPos(begin + stop, "x", true);
            if (kind === "slow") {
              ctx.fillStyle = ink("slow");
              ctx.fillRect(left, y + full - 5 * ratio, Math.max(right - left, 3 * ratio), 4 * ratio);
            } else {
              ctx.fillStyle = ink("bad");
              ctx.beginPath();
              ctx.moveTo(left, y + full * (0.85 - 0.7 * small));
              ctx.lineTo(left + 6 * ratio * small, y + full * 0.85);
              ctx.lineTo(left - 6 * ratio * small, y + full * 0.85);
              ctx.fill();
            }
          }
        });
        const y = bbox.top, full = bbox.height * 2 / total;
        ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
        ctx.textBaseline = "middle";
        ctx.textAlign = "left";
        for (const [attempt, [start, stop]] of starts) {
          const left = u.valToPos(begin + start, "x", true), right = u.valToPos(begin + stop, "x", true);
          if (right < bbox.left || left > bbox.left + bbox.width) continue;
          const wide = ctx.measureText(attempt).width;
          const x = Math.max(left, bbox.left) + 5 * ratio;
          if (right - x < wide + 8 * ratio) continue;
          ctx.fillStyle = "#fff";
          ctx.strokeStyle = "rgb(0 0 0 / .55)";
          ctx.lineWidth = 3 * ratio;
          ctx.lineJoin = "round";
          ctx.strokeText(attempt, x, y + full / 2);
          ctx.fillText(attempt, x, y + full / 2);
        }
      });
    }
    function at(lane, seconds) {
      let low = 0, high = lane.spans.length;
      while (low < high) { const middle = (low + high) >> 1; if (lane.spans[middle][1] <= seconds) low = middle + 1; else high = middle; }
      const found = lane.spans[low - 1];
      return found && seconds <= found[2] ? found : undefined;
    }
    const box = tip(host);
    const chart = {};
    const labels = window.matchMedia("(max-width: 640px)").matches ? 64 : 110;
    function hover(u) {
      const { left, top: y } = u.cursor;
      if (left === undefined || left < 0) { box.hide(); return; }
      const row = Math.floor(y / u.over.clientHeight * total);
      const index = Math.min(lanes.length - 1, Math.max(0, row <= 1 ? 0 : row - 1)), lane = lanes[index];
      const seconds = u.posToVal(left, "x") - begin;
      const slack = u.posToVal(left + 6, "x") - u.posToVal(left, "x");
      const marks = lane.marks.filter((mark) => mark[2] - slack <= seconds && seconds <= mark[3] + slack);
      const one = at(lane, seconds);
      if (!one && !marks.length) { box.hide(); return; }
      const lines = [];
      if (one) {
        const launch = one[4] ? `, launch ${one[4]}` : "";
        lines.push(`${use(one) === "queue" || use(one) === "stopped" ? "before " : ""}attempt ${one[3]}${launch}${index ? ` on ${lane.name}` : ""}`);
        lines.push(`${clock(begin + one[1], true)} → ${clock(begin + one[2])}`);
      }
      marks.forEach((mark) => lines.push(mark[4]));
      box.show(left + u.over.offsetLeft, y, one ? `${names[use(one)]}, ${span(one[2] - one[1])}` : lane.name, lines);
    }
    chart.plot = new uPlot({
      width: host.clientWidth, height: height(), tzDate, legend: { show: false }, padding: [4, 24, 0, 0],
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: true } },
      scales: { x: { time: true, range: (u, min, max) => [min, max] }, y: { range: [0, 1] } },
      series: [{}, { paths: () => null, points: { show: false } }],
      axes: [axis({ values: DATES }), axis({
        size: labels, grid: { show: false }, ticks: { show: false }, gap: 6,
        splits: () => lanes.map((_, index) => 1 - top(index) - weight(index) / total / 2),
        values: () => lanes.map((lane) => (lane.name.length > labels / 7 ? `${lane.name.slice(0, labels / 7 - 1)}…` : lane.name)),
      })],
      hooks: { draw: [draw], setCursor: [hover], setScale: [(u, key) => { if (key === "x" && chart.zoomed) chart.zoomed(u.scales.x); }] },
    }, [[begin, end], [0, 0]], host);
    zoomable(host, chart, () => [begin, end]);
    fitted(host, chart, height);
    charts.push(chart);
    return chart;
  }

  // -- the curves ------------------------------------------------------------------------------------
  const KINDS = {
    discarded: ["thrown away", "discarded"], rollback: ["rollbacks", "rollback"], skip: ["skipped updates", "skip"],
    lr: ["learning rate", "lr"], incident: ["incidents", "bad"], restart: ["restarts", "muted"], checkpoint: ["checkpoints", "mark"],
  };
  // The color of a checkpoint, the trust that it marks, and the name of that trust.
  const TRUSTS = [["good", ["good"], "good checkpoint"], ["training", ["written", "verified", "unknown"], "saved checkpoint"],
    ["bad", ["suspect", "gone", "unreadable"], "suspect or lost checkpoint"], ["queue", ["pruned"], "deleted checkpoint"]];
  const trustOf = (mark) => mark[0].slice("checkpoint-".length);
  const colorOf = (trust) => (TRUSTS.find(([, trusts]) => trusts.includes(trust)) || TRUSTS[1])[0];
  function curves(host, onZoom) {
    const shown = new Set(Object.keys(KINDS));
    const select = byId("figure"), over = byId("axis"), log = byId("log");
    const begin = data.begin;
    const kindOf = (mark) => mark[0].split("-")[0];
    const present = new Set(data.marks.map(kindOf));
    if (data.figures.some((each) => each.branches.length)) present.add("discarded");
    for (const [kind, [label, color]] of Object.entries(KINDS)) {
      if (!present.has(kind)) continue;
      const button = element("button", undefined, element("li", undefined, byId("marks")));
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const key = element("i", undefined, button);
      key.style.background = `var(--${color})`;
      button.append(label);
      button.onclick = () => {
        if (!shown.delete(kind)) shown.add(kind);
        button.setAttribute("aria-pressed", String(shown.has(kind)));
        chart.plot.redraw(false);
      };
    }
    // What the colors of the checkpoints mean, of those that there are.
    for (const [color, trusts, label] of TRUSTS) {
      if (!data.marks.some((mark) => kindOf(mark) === "checkpoint" && trusts.includes(trustOf(mark)))) continue;
      const item = element("li", undefined, byId("marks"));
      item.className = "trusts";
      element("i", undefined, item).style.background = `var(--${color})`;
      item.append(label);
    }
    const chart = {};
    const ABOVE = 18;  // pixels over the plot for what happened
    const box = tip(host);
    const byStep = () => over.value === "step";
    const xOf = (points, index) => (byStep() ? points.steps[index] : begin + points.times[index]);
    const xOfMark = (mark) => (byStep() ? mark[1] : begin + mark[3]);
    const height = () => (window.innerWidth < 640 ? 300 : 400);
    let current;

    function line(u, ctx, points, ratio) {
      ctx.beginPath();
      let open = false;
      points.values.forEach((value, index) => {
        if (value === null || (log.checked && value <= 0)) { open = false; return; }
        const x = u.valToPos(xOf(points, index), "x", true), y = u.valToPos(value, "y", true);
        if (open) ctx.lineTo(x, y); else ctx.moveTo(x, y);
        open = true;
      });
      ctx.stroke();
    }
    function vertical(ctx, x, bbox) {
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    // Lines from top to bottom that are closer than this hide the curve: then they are ticks.
    function crowded(u, kind, bbox, ratio) {
      const { min, max } = u.scales.x;
      const inSight = data.marks.filter((mark) => kindOf(mark) === kind && xOfMark(mark) >= min && xOfMark(mark) <= max);
      return inSight.length > bbox.width / ratio / 14;
    }
    function behind(u) {
      clipped(u, (ctx, bbox, ratio) => {
        const many = { lr: crowded(u, "lr", bbox, ratio), restart: crowded(u, "restart", bbox, ratio) };
        for (const mark of data.marks) {
          const kind = kindOf(mark);
          if (!shown.has(kind)) continue;
          const x = u.valToPos(xOfMark(mark), "x", true);
          if (kind === "lr") {
            const stop = byStep() && mark[2] !== null ? u.valToPos(mark[2], "x", true) : x;
            ctx.globalAlpha = 0.13;
            ctx.fillStyle = ink("lr");
            ctx.fillRect(x, bbox.top, Math.max(0, stop - x), bbox.height);
            ctx.globalAlpha = 1;
            ctx.setLineDash([]);
            ctx.strokeStyle = ink("lr");
            ctx.lineWidth = 1.5 * ratio;
            vertical(ctx, x, many.lr ? { top: bbox.top, height: 14 * ratio } : bbox);
            if (many.lr) continue;
            ctx.fillStyle = ink("lr");
            ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
            ctx.textAlign = "left";
            const label = (/x[\d.e-]+ → (x[\d.e-]+)/.exec(mark[4]) || ["", ""])[1];
            ctx.fillText(`LR ${label.replace("x", "×")}`, x + 4 * ratio, bbox.top + 24 * ratio);
          } else if (kind === "restart") {
            ctx.setLineDash([2 * ratio, 4 * ratio]);
            ctx.strokeStyle = ink("muted");
            ctx.lineWidth = 1 * ratio;
            vertical(ctx, x, many.restart ? { top: bbox.top, height: 10 * ratio } : bbox);
          }
        }
      });
    }
    function before(u) {
      clipped(u, (ctx, bbox, ratio) => {
        if (shown.has("discarded")) {
          ctx.strokeStyle = ink("discarded");
          ctx.globalAlpha = 0.6;
          ctx.lineWidth = 1.6 * ratio;
          ctx.setLineDash([5 * ratio, 4 * ratio]);
          current.branches.forEach((branch) => line(u, ctx, branch, ratio));
          ctx.globalAlpha = 1;
          ctx.setLineDash([]);
        }
        const floor = bbox.top + bbox.height;
        const size = (crowded(u, "checkpoint", bbox, ratio) ? 2 : 4) * ratio;
        const dot = (crowded(u, "incident", bbox, ratio) ? 2 : 4) * ratio;
        const places = new Map();
        for (const mark of data.marks) {
          const kind = kindOf(mark);
          if (!shown.has(kind)) continue;
          const x = u.valToPos(xOfMark(mark), "x", true);
          if (kind === "checkpoint") {
            ctx.fillStyle = ink(colorOf(trustOf(mark)));
            ctx.beginPath();
            ctx.moveTo(x, floor - 2.4 * size);
            ctx.lineTo(x + size, floor - 1.2 * size);
            ctx.lineTo(x, floor);
            ctx.lineTo(x - size, floor - 1.2 * size);
            ctx.fill();
          } else if (kind === "skip") {
            const stop = byStep() ? u.valToPos(mark[2], "x", true) : x;
            ctx.fillStyle = ink("skip");
            ctx.fillRect(x - 1.5 * ratio, floor - 5.4 * size, Math.max(3 * ratio, stop - x + 3 * ratio), 2 * size);
          } else if (kind === "incident") {
            ctx.fillStyle = ink("bad");
            ctx.beginPath();
            // Above the plot, where no value of the curve can be meant; those at one place side by side.
            const place = Math.round(x / dot / 2), beside = places.get(place) || 0;
            places.set(place, beside + 1);
            ctx.arc(x - Math.min(beside, 9) * 2.4 * dot, bbox.top - 9 * ratio, dot, 0, 7);
            ctx.fill();
          } else if (kind === "rollback" && byStep()) {
            const back = u.valToPos(mark[2], "x", true), y = bbox.top - 9 * ratio;
            ctx.strokeStyle = ctx.fillStyle = ink("rollback");
            ctx.lineWidth = 1.6 * ratio;
            ctx.beginPath();
            ctx.moveTo(x, y);
            ctx.lineTo(back + 5 * ratio, y);
            ctx.stroke();
            ctx.beginPath();
            ctx.moveTo(back, y);
            ctx.lineTo(back + 8 * ratio, y - 4 * ratio);
            ctx.lineTo(back + 8 * ratio, y + 4 * ratio);
            ctx.fill();
            ctx.globalAlpha = 0.08;
            ctx.fillRect(back, bbox.top, x - back, bbox.height);
            ctx.globalAlpha = 1;
          }
        }
      }, ABOVE * (devicePixelRatio || 1));
    }
    function hover(u) {
      const { left, top } = u.cursor;
      if (left === undefined || left < 0) { box.hide(); return; }
      const x = u.posToVal(left, "x"), slack = Math.abs(u.posToVal(left + 6, "x") - x);
      const lines = [];
      const near = data.marks.filter((mark) => {
        const from = xOfMark(mark), to = byStep() && kindOf(mark) === "skip" ? mark[2] : from;
        return shown.has(kindOf(mark)) && from - slack <= x && x <= to + slack;
      });
      near.slice(0, 6).forEach((mark) => lines.push(mark[4]));
      if (near.length > 6) lines.push(`and ${near.length - 6} more`);
      const index = u.cursor.idx;
      if (index !== null && index !== undefined && current.values.length) {
        lines.unshift(`${clock(begin + current.times[index], true)}`);
        box.show(left + u.over.offsetLeft, top, `step ${current.steps[index]}: ${figure(current.values[index])}`, lines);
      } else if (lines.length) box.show(left + u.over.offsetLeft, top, lines[0], lines.slice(1));
      else box.hide();
    }
    function limits() {
      const all = [...current.values, ...current.branches.flatMap((each) => each.values)];
      const usable = all.filter((value) => value !== null && (!log.checked || value > 0));
      return usable.length ? [Math.min(...usable), Math.max(...usable)] : [log.checked ? 0.1 : 0, 1];
    }
    function whole() {
      const all = [current, ...current.branches].flatMap((each) => (each.steps.length ? [xOf(each, 0), xOf(each, each.steps.length - 1)] : []));
      const marks = data.marks.map(xOfMark);
      const least = Math.min(...all, ...marks), most = Math.max(...all, ...marks);
      const first = byStep() ? Math.min(0, least) : data.begin;
      // What happens at the last step is drawn whole.
      return most > first ? [first, byStep() ? most + (most - first) * 0.012 : Math.max(most, data.end)] : [first, first + 1];
    }
    function build() {
      current = data.figures[select.selectedIndex];
      if (chart.plot) chart.plot.destroy();
      const xs = current.steps.map((_, index) => xOf(current, index));
      const [low, high] = limits();
      const few = current.steps.length < 60;
      chart.plot = new uPlot({
        width: host.clientWidth, height: height(), tzDate, legend: { show: false }, padding: [ABOVE + 4, 22, 0, 0],
        cursor: { drag: { x: true, y: false, setScale: true }, points: { size: 7 } },
        scales: {
          x: { time: !byStep(), range: (u, min, max) => (u.status === 0 || min === null ? whole() : [min, max]) },
          y: { distr: log.checked ? 3 : 1, range: log.checked ? [low / 1.2, high * 1.2] : [low - (high - low || 1) * 0.09, high + (high - low || 1) * 0.12] },
        },
        series: [{}, { stroke: () => ink("curve"), width: 2, spanGaps: false, points: { show: few, size: 5, fill: () => ink("card") } }],
        axes: [axis(byStep() ? { ...titled("step"), size: 34, space: 70, values: (u, values) => values.map((value) => (Number.isInteger(value) ? value.toLocaleString("en") : "")) } : { ...titled("time"), values: DATES }),
          axis({ ...titled(current.name), size: 62, values: (u, values) => values.map((value) => (value === null ? "" : figure(value))) })],
        hooks: { drawAxes: [behind, before], setCursor: [hover], setScale: [(u, key) => { if (key === "x" && u.status && !byStep()) onZoom(u.scales.x); }] },
      }, [xs, current.values], host);
      chart.plot.setScale("x", { min: whole()[0], max: whole()[1] });
    }
    build();
    select.onchange = over.onchange = log.onchange = build;
    zoomable(host, chart, whole);
    fitted(host, chart, height);
    chart.follow = (scale) => {
      if (byStep() || !chart.plot) return;
      const own = chart.plot.scales.x;
      if (own.min !== scale.min || own.max !== scale.max) chart.plot.setScale("x", { min: scale.min, max: scale.max });
    };
    charts.push(chart);
    return chart;
  }

  // -- several runs ------------------------------------------------------------------------------------
  const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b4fb5", "#8a8f00"];
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  function together(host) {
    const style = (index) => ({ color: COLORS[index % COLORS.length], dash: DASHES[Math.floor(index / COLORS.length) % DASHES.length] });
    const tables = data.curves.map((each) => [each.steps, each.values]);
    const joined = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const box = tip(host), chart = {};
    const height = () => (window.innerWidth < 640 ? 300 : 420);
    data.curves.forEach((each, index) => {
      for (const one of document.querySelectorAll("[data-run]")) {
        if (one.dataset.run !== each.run) continue;
        one.style.background = style(index).color;
        one.closest("tr").onmouseenter = () => chart.plot.setSeries(index + 1, { focus: true });
        one.closest("tr").onmouseleave = () => chart.plot.setSeries(null, { focus: false });
      }
    });
    function hover(u) {
      const { left, top, idx } = u.cursor;
      if (left === undefined || left < 0 || idx === null || idx === undefined) { box.hide(); return; }
      const x = u.posToVal(left, "x");
      const near = data.curves.map((each) => {
        let at = 0;
        each.steps.forEach((step, index) => { if (Math.abs(step - x) < Math.abs(each.steps[at] - x)) at = index; });
        return [each.run, each.values[at], each.steps[at]];
      }).filter((each) => each[1] !== null && x <= u.scales.x.max).sort((one, other) => one[1] - other[1]);
      box.show(left + u.over.offsetLeft, top, `${data.figure} near step ${Math.round(x)}`,
        near.slice(0, 8).map(([run, value]) => `${figure(value)}  ${run}`).concat(near.length > 8 ? [`and ${near.length - 8} more`] : []));
    }
    chart.plot = new uPlot({
      width: host.clientWidth, height: height(), legend: { show: false }, padding: [8, 22, 0, 0], focus: { alpha: 0.2 },
      cursor: { drag: { x: true, y: false }, focus: { prox: 12 }, points: { size: 6 } },
      scales: { x: { time: false } },
      series: [{}, ...data.curves.map((each, index) => ({ label: each.run, stroke: style(index).color, dash: style(index).dash, width: 1.8, spanGaps: true, points: { show: each.steps.length < 30, size: 4 } }))],
      axes: [axis({ ...titled("step"), size: 34, space: 70 }), axis({ ...titled(data.figure), size: 62, values: (u, values) => values.map((value) => (value === null ? "" : figure(value))) })],
      hooks: { setCursor: [hover] },
    }, joined, host);
    zoomable(host, chart, () => [joined[0][0], joined[0][joined[0].length - 1]]);
    fitted(host, chart, height);
    charts.push(chart);
  }

  // -- the page ------------------------------------------------------------------------------------------
  function theme() {
    const button = byId("theme"), words = ["auto", "light", "dark"];
    let chosen = "auto";
    try { chosen = localStorage.getItem("slurm-forge-theme") || "auto"; } catch { /* a file that was mailed */ }
    function apply() {
      if (chosen === "auto") root.removeAttribute("data-theme"); else root.setAttribute("data-theme", chosen);
      button.textContent = `${{ auto: "◐", light: "☀", dark: "☾" }[chosen]} theme`;
      button.setAttribute("aria-label", `Theme: ${chosen === "auto" ? "automatic" : chosen}`);
      charts.forEach((each) => each.plot && each.plot.redraw(false, true));
    }
    button.onclick = () => {
      chosen = words[(words.indexOf(chosen) + 1) % 3];
      try { localStorage.setItem("slurm-forge-theme", chosen); } catch { /* as above */ }
      apply();
    };
    apply();
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
    let before = "auto";
    window.addEventListener("beforeprint", () => { before = chosen; chosen = "light"; apply(); });
    window.addEventListener("afterprint", () => { chosen = before; apply(); });
  }
  function copying() {
    for (const code of document.querySelectorAll("code.command")) {
      const button = element("button", "copy");
      button.type = "button";
      button.className = "copy";
      button.setAttribute("aria-label", `Copy ${code.textContent}`);
      button.onclick = () => navigator.clipboard.writeText(code.textContent).then(
        () => { button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1500); },
        () => { getSelection().selectAllChildren(code); });
      if (navigator.clipboard) code.after(button);
    }
  }
  function filtering() {
    const cards = [...document.querySelectorAll(".incident")], tools = byId("filter");
    const causes = [...new Set(cards.map((each) => each.dataset.cause))].sort();
    if (!tools || cards.length < 6) return;
    tools.hidden = false;
    const select = element("select", undefined, element("label", "Cause ", tools));
    ["all", ...causes].forEach((each) => element("option", each, select));
    select.onchange = () => cards.forEach((each) => { each.hidden = select.selectedIndex > 0 && each.dataset.cause !== select.value; });
    const button = element("button", "Open all", tools);
    button.type = "button";
    button.onclick = () => {
      const open = button.textContent === "Open all";
      cards.forEach((each) => { each.open = open; });
      button.textContent = open ? "Close all" : "Open all";
    };
  }

  copying();
  filtering();
  if (data.kind === "run") {
    const first = byId("timeline-chart") ? timeline(byId("timeline-chart")) : null;
    const second = byId("loss-chart")
      ? curves(byId("loss-chart"), (scale) => {
        const own = first && first.plot.scales.x;
        if (own && (own.min !== scale.min || own.max !== scale.max)) first.plot.setScale("x", { min: scale.min, max: scale.max });
      }) : null;
    if (first) first.zoomed = (scale) => second && second.follow(scale);
  } else if (byId("index-chart") && data.curves.length) {
    together(byId("index-chart"));
  }
  theme();
  root.dataset.ready = "yes";
})();
