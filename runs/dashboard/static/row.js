// One run: its band of CFs, heat map of layers, curve of quality, and what the pointer is on.

import {ask, cfName, element} from './page.js';
import {drawAxis, drawBand, drawLayers, drawQuality, LAYER_HEIGHT} from './draw.js';
import {Tip, last} from './tip.js';

export class Row {
  constructor(name, view, on) {
    this.name = name;
    this.view = view;
    this.on = on;
    this.data = null;
    this.whole = null; // what an unzoomed answer said of steps and seconds
    this.stale = true;
    this.visible = false;
    this.domain = [0, 1];
    this.facts = element('span', {className: 'facts'}, 'loading ...');
    this.verdict = element('p', {className: 'verdict'});
    this.band = element('canvas', {className: 'band', role: 'img', 'aria-label': `CFs of ${name}`});
    this.layers = element('canvas', {className: 'layers', hidden: true});
    this.quality = element('canvas', {className: 'quality', hidden: true});
    this.axis = element('canvas', {className: 'axis'});
    this.line = element('div', {className: 'cross', hidden: true});
    this.brush = element('div', {className: 'brush', hidden: true});
    this.plot = element('div', {className: 'plot'},
      this.band, this.layers, this.quality, this.axis, this.line, this.brush);
    this.element = element('section', {className: 'run'},
      element('h2', {}, element('span', {className: 'name'}, name), this.facts),
      this.verdict, this.plot);
    this.element.dataset.run = name;
    this.listen();
  }

  // -- data --------------------------------------------------------------------------------------

  setVisible(visible) {
    this.visible = visible;
    this.load();
  }

  outdate() {
    this.stale = true;
    this.load();
  }

  async load() {
    if (!this.stale || !this.visible) return;
    this.stale = false;
    const asked = (this.asked = {});
    const {span} = this.view;
    const [from, to] = span ? [this.stepAt(span[0], 0), this.stepAt(span[1], 1)] : [null, null];
    let data;
    try {
      data = await ask('timeline', {run: this.name, quality: this.view.quality, from, to});
    } catch (error) {
      this.facts.textContent = `could not be read: ${error.message}`;
      return;
    }
    if (this.asked !== asked) return; // a newer question is under way
    this.data = data;
    if (from === null) this.whole = data.numbers;
    const cf = data.band.cf.at(-1);
    const moves = `${data.moves} switch${data.moves === 1 ? '' : 'es'}`;
    this.facts.textContent = `${cfName(cf)} at step ${data.to}, ${moves}`;
    this.verdict.textContent = data.headline;
    this.element.dataset.loaded = 'yes';
    this.on.loaded();
  }

  // Steps are what the server knows: seconds are looked up in the whole run, of which not every step
  // is there. after: 1 for the next one that is, so that what is shown reaches as far as x.
  stepAt(x, after) {
    if (this.view.axis === 'step' || !this.whole) return Math.round(x);
    const {step, second} = this.whole;
    return step[Math.min(Math.max(0, last(second, x)) + after, step.length - 1)];
  }

  end(axis) {
    if (!this.data) return 0;
    return axis === 'step' ? this.data.last + 1 : this.data.seconds;
  }

  largestCF() {
    if (!this.data) return 1;
    const layers = this.data.layers ? this.data.layers.cf.flat() : [];
    return [...this.data.band.cf, ...layers].reduce((a, b) => Math.max(a, b ?? 1), 1);
  }

  // -- drawing -----------------------------------------------------------------------------------

  draw(domain, most) {
    this.domain = domain;
    this.most = most;
    const {data} = this;
    if (!data) return;
    this.layers.hidden = !data.layers;
    this.quality.hidden = !data.quality;
    const scale = {axis: this.view.axis, domain, most};
    drawBand(this.band, data, scale);
    if (data.layers) {
      const height = Math.max(3, Math.min(LAYER_HEIGHT, 240 / data.layers.names.length));
      this.layers.style.height = `${height * data.layers.names.length}px`;
      drawLayers(this.layers, data.layers, scale);
    }
    if (data.quality) drawQuality(this.quality, data.quality, scale);
    drawAxis(this.axis, scale);
  }

  // -- the pointer -------------------------------------------------------------------------------

  listen() {
    let from = null;
    this.plot.addEventListener('pointermove', (event) => {
      const {x, width} = this.at(event);
      this.on.pointed(this.value(x, width));
      this.showBrush(from, x);
      Tip.show(this, this.value(x, width), this.layerAt(event), event);
    });
    this.plot.addEventListener('pointerleave', () => {
      this.on.pointed(null);
      Tip.hide();
    });
    this.plot.addEventListener('pointerdown', (event) => {
      from = this.at(event).x;
      this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener('pointerup', (event) => {
      const {x, width} = this.at(event);
      if (from !== null && Math.abs(x - from) > 5) {
        const ends = [from, x].sort((a, b) => a - b).map((end) => this.value(end, width));
        this.on.zoomed(...ends);
      }
      from = null;
      this.showBrush(null, 0);
    });
    this.plot.addEventListener('dblclick', () => this.on.whole());
  }

  at(event) {
    const box = this.plot.getBoundingClientRect();
    return {x: Math.min(Math.max(event.clientX - box.left, 0), box.width), width: box.width};
  }

  value(x, width) {
    const [low, high] = this.domain;
    return low + (x / width) * (high - low);
  }

  layerAt(event) {
    if (!this.data?.layers || event.target !== this.layers) return null;
    const box = this.layers.getBoundingClientRect();
    const rows = this.data.layers.names.length;
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    return row >= 0 && row < rows ? row : null;
  }

  cross(x) {
    const [low, high] = this.domain;
    this.line.hidden = x === null;
    if (x !== null) this.line.style.left = `${(100 * (x - low)) / (high - low)}%`;
  }

  showBrush(from, x) {
    this.brush.hidden = from === null;
    if (from === null) return;
    this.brush.style.left = `${Math.min(from, x)}px`;
    this.brush.style.width = `${Math.abs(x - from)}px`;
  }
}
