// What a pointer does on a plot: it points, drags out a part, and clicks twice for the whole.

import {element} from './page.js';

export class Pointer {
  // on: pointed(value or null, event), zoomed(from, to), whole(). Values are those of `domain`, which
  // begins `left` pixels from the plot's edge.
  constructor(plot, on) {
    this.plot = plot;
    this.on = on;
    this.domain = [0, 1];
    this.left = 0;
    this.line = element('div', {className: 'cross', hidden: true});
    this.brush = element('div', {className: 'brush', hidden: true});
    plot.append(this.line, this.brush);
    let from = null;
    plot.addEventListener('pointermove', (event) => {
      this.showBrush(from, this.at(event));
      on.pointed(this.value(this.at(event)), event);
    });
    plot.addEventListener('pointerleave', () => on.pointed(null));
    plot.addEventListener('pointerdown', (event) => {
      from = this.at(event);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener('pointerup', (event) => {
      const to = this.at(event);
      if (from !== null && Math.abs(to - from) > 5) {
        on.zoomed(...[from, to].sort((a, b) => a - b).map((x) => this.value(x)));
      }
      from = null;
      this.showBrush(null, 0);
    });
    plot.addEventListener('dblclick', () => on.whole());
  }

  // Pixels from the plot's edge, within the domain.
  at(event) {
    const box = this.plot.getBoundingClientRect();
    return Math.min(Math.max(event.clientX - box.left, this.left), box.width);
  }

  value(x) {
    const [low, high] = this.domain;
    return low + ((x - this.left) / (this.plot.clientWidth - this.left)) * (high - low);
  }

  cross(value) {
    const [low, high] = this.domain;
    const share = value === null ? -1 : (value - low) / (high - low);
    this.line.hidden = !(share >= 0 && share <= 1);
    this.line.style.left = `${this.left + share * (this.plot.clientWidth - this.left)}px`;
  }

  showBrush(from, x) {
    this.brush.hidden = from === null;
    if (from === null) return;
    this.brush.style.left = `${Math.min(from, x)}px`;
    this.brush.style.width = `${Math.abs(x - from)}px`;
  }
}
