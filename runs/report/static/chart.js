// Lines of several runs in one chart, over an axis that the reader chooses; pointing tells values,
// dragging zooms.

import {colour, runColour} from './colours.js';
import {clip, dot, drawAxis, path, pen, sideLabel, ticks} from './draw.js';
import {cssColour, element, last, short} from './page.js';
import {Pointer} from './pointer.js';
import {Tip, fact} from './tip.js';

const LEFT = 76; // pixels for numbers
const DASHES = [[], [7, 4], [2, 3], [8, 3, 2, 3]];
const LINEAR = {to: (value) => value, from: (value) => value, ticks};
const LOG = {to: Math.log10, from: (value) => 10 ** value, ticks: roundOnes};

// Numbers of one or two digits between two powers of ten, few enough to be read.
function roundOnes(low, high) {
  const parts = high - low > 2.5 ? [1] : high - low > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  const found = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    for (const part of parts) {
      const at = power + Math.log10(part);
      if (at >= low && at <= high) found.push(at);
    }
  }
  return found;
}

export class Chart {
  // what: {xs: [{title, log}], lines: [{name, run or cf, dash, x: [values of each axis], y}], y: {title,
  // log, low, high}, limit: {value, title}}; null in x or y is not known.
  constructor(box, what) {
    this.what = what;
    this.x = 0;
    this.span = null;
    this.canvas = element('canvas', {className: 'curves', role: 'img'});
    this.canvas.setAttribute('aria-label', box.title);
    box.removeAttribute('title');
    this.axis = element('canvas', {className: 'axis'});
    this.plot = element('div', {className: 'plot'}, this.canvas, this.axis);
    this.plot.dataset.left = LEFT;
    this.legend = element('div', {className: 'lines'});
    box.append(this.choice(), this.plot, this.legend);
    this.pointer = new Pointer(this.plot, {
      pointed: (at, event) => {
        this.pointer.cross(at);
        Tip.show(at === null ? [] : this.tell(at), event);
      },
      zoomed: (from, to) => this.zoom([from, to]),
      whole: () => this.zoom(null),
    });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  choice() {
    const names = this.what.xs.map(({title}) => title);
    if (names.length < 2) return '';
    const select = element('select', {onchange: () => {
      this.x = select.selectedIndex;
      this.zoom(null);
    }}, ...names.map((name) => element('option', {}, name)));
    return element('label', {className: 'over'}, `${this.what.y.title} over `, select);
  }

  zoom(span) {
    this.span = span;
    this.draw();
  }

  // Points as places on the axes, which may be logarithmic; null where a line has a gap.
  places({x, y}) {
    const [toX, toY] = [this.scaleX.to, this.scaleY.to];
    return x[this.x].map((value, i) => (
      value === null || y[i] === null ? null : [toX(value), toY(y[i])]));
  }

  draw() {
    if (!this.canvas.clientWidth) return;
    const {xs, y, lines, limit} = this.what;
    this.scaleX = xs[this.x].log ? LOG : LINEAR;
    this.scaleY = y.log ? LOG : LINEAR;
    const curves = lines.map((line) => this.places(line));
    const known = curves.flat().filter(Boolean);
    const ends = known.map(([at]) => at);
    const [first, end] = [xs[this.x].log ? Math.min(...ends) : 0, Math.max(...ends)];
    const domain = this.span ?? [first, end + 0.01 * (end - first)];
    Object.assign(this.pointer, {domain, left: LEFT});
    const [low, high] = this.range(known, domain);
    const {context, width, height, x} = pen(this.canvas, {domain, left: LEFT});
    const place = (value) => 8 + (1 - (value - low) / (high - low)) * (height - 16);
    for (const at of this.scaleY.ticks(low, high, 5)) {
      sideLabel(context, short(this.scaleY.from(at)), LEFT, place(at), width);
    }
    clip(context, LEFT, width, height);
    if (limit) this.drawLimit(context, limit, place, width);
    lines.forEach((line, i) => {
      context.strokeStyle = context.fillStyle = lineColour(line);
      context.lineWidth = 2;
      context.setLineDash(DASHES[line.dash ?? 0]);
      const points = curves[i].map((at) => at && [x(at[0]), place(at[1])]);
      path(context, points);
      points.forEach((at, j) => {
        const alone = !points[j - 1] && !points[j + 1];
        if (at && (alone || points.length < 60)) dot(context, ...at, 3);
      });
    });
    drawAxis(this.axis, {domain, left: LEFT, title: '', text: (at) => short(this.scaleX.from(at))},
      this.scaleX.ticks(...domain, Math.max(2, Math.floor((width - LEFT) / 90))));
    this.drawLegend();
  }

  // Of the values that are to be seen, with some air.
  range(known, [from, to]) {
    const inside = known.filter(([at]) => at >= from && at <= to).map(([, value]) => value);
    const seen = inside.length ? inside : known.map(([, value]) => value);
    const {low, high} = this.what.y;
    const [least, most] = [low ?? Math.min(...seen), high ?? Math.max(...seen)];
    const air = 0.04 * (most - least) || 0.05 * Math.abs(most) || 1;
    return [least - air, most + air];
  }

  drawLimit(context, limit, place, width) {
    const y = Math.round(place(this.scaleY.to(limit.value)));
    context.fillStyle = context.strokeStyle = cssColour('--line');
    context.lineWidth = 1;
    context.setLineDash([2, 3]);
    path(context, [[LEFT, y], [width, y]]);
  }

  drawLegend() {
    this.legend.replaceChildren(
      element('span', {className: 'unit'}, `→ ${this.what.xs[this.x].title}`),
      ...this.what.lines.map((line) => {
        const swatch = element('i');
        swatch.style.borderTop = `3px ${line.dash ? 'dashed' : 'solid'} ${lineColour(line)}`;
        return element('span', {}, swatch, line.name);
      }),
      ...(this.what.limit ? [element('span', {}, limitSwatch(), this.what.limit.title)] : []),
    );
  }

  // The last value of each line at a place of the axis.
  tell(at) {
    const {lines, xs} = this.what;
    const told = [element('div', {className: 'where'},
      `${xs[this.x].title}: ${short(this.scaleX.from(at))}`)];
    for (const line of lines) {
      const points = this.places(line).filter(Boolean);
      const i = last(points.map(([x]) => x), at);
      if (i >= 0) told.push(fact(line.name, short(this.scaleY.from(points[i][1]))));
    }
    return told;
  }
}

function limitSwatch() {
  const swatch = element('i');
  swatch.style.borderTop = `2px dotted ${cssColour('--line')}`;
  return swatch;
}

function lineColour(line) {
  return 'cf' in line ? colour(line.cf) : runColour(line.run);
}
