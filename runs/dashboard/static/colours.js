// The palette of the dashboard and of reports: CFs on a scale that is the same everywhere, runs.

import {element, isDark} from './page.js';

// The same hues in the same order; what stands out from the page is another lightness.
const LIGHT = ['#8ccfc0', '#36a3b4', '#3b6fb6', '#7a3b9a', '#3d0f5c'];
const DARK = ['#4f8a7d', '#46bccd', '#7fb0f2', '#c78be8', '#f3c6ff'];
const DENSE = {light: '#9aa0a8', dark: '#8d939c'};
const LARGEST = 1000; // and what is larger

const RUNS = {
  light: ['#1f5fa8', '#d9730d', '#2f8f4e', '#b2182b', '#7b3294', '#018571', '#a6611a', '#6f78b8'],
  dark: ['#7ab0ee', '#f0a04b', '#6cc98a', '#f0808c', '#c58fe0', '#4fc7b3', '#d9a066', '#a9b1ea'],
};

// Colour by CF, on a log scale; dense is grey. What is shown beside it does not change it.
export function colour(cf) {
  if (cf === null) return 'transparent';
  if (cf <= 1) return isDark() ? DENSE.dark : DENSE.light;
  const stops = isDark() ? DARK : LIGHT;
  const at = Math.min(1, Math.log(cf) / Math.log(LARGEST)) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return mix(stops[low], stops[low + 1], at - low);
}

// Colour of a run among others; null: of a dense one.
export function runColour(index) {
  const theme = isDark() ? 'dark' : 'light';
  return index === null ? DENSE[theme] : RUNS[theme][index % RUNS[theme].length];
}

function mix(a, b, share) {
  const part = (hex, i) => parseInt(hex.slice(1 + 2 * i, 3 + 2 * i), 16);
  const mixed = [0, 1, 2].map((i) => Math.round(part(a, i) * (1 - share) + part(b, i) * share));
  return `rgb(${mixed.join(' ')})`;
}

// Dense, then the scale with its powers of ten, and what the marks say.
export function legend(into) {
  const dense = element('span', {className: 'swatch'});
  dense.style.background = colour(1);
  const scale = element('span', {className: 'scale'});
  const steps = Array.from({length: 25}, (_, i) => colour(1.0001 * LARGEST ** (i / 24)));
  scale.style.background = `linear-gradient(to right, ${steps.join(', ')})`;
  for (let cf = 10; cf <= LARGEST; cf *= 10) {
    const tick = element('span', {className: 'tick'}, cf < LARGEST ? `${cf}` : `${cf} +`);
    tick.style.left = `${(100 * Math.log(cf)) / Math.log(LARGEST)}%`;
    scale.append(tick);
  }
  const hint = element('span', {className: 'hint'},
    '▼ changed its CF   ▽ weighed other CFs and kept its own   |   '
    + 'grey curve: a dense run   |   drag to zoom, double-click for the whole run');
  into.replaceChildren('dense (CF 1: all is sent)', dense, 'CF: sends one in', scale, hint);
}
