"""The planning page: one self-contained HTML file, drawn by Chart.js (MIT, shipped in assets/). No network."""
