// Write the layout of the page in the frame `page` as JSON into the element `result`.
const frame = document.getElementById("page"), layout = {};
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  layout.overflow = root.scrollWidth - root.clientWidth;
  layout.titles = [...page.querySelectorAll("h2")].map(e => e.textContent);
  layout.headline = page.querySelector("h1").textContent;
  layout.scripts = page.querySelectorAll("script, iframe, [onclick], [onload], [onerror]").length;
  layout.clipped = []; layout.overlap = []; layout.pictures = 0; layout.small = [];
  for (const svg of page.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    if (!box.width) continue;
    layout.pictures += 1;
    const texts = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
    for (const [text, rect] of texts) {
      if (rect.left < box.left - 2 || rect.right > box.right + 2 || rect.top < box.top - 2 || rect.bottom > box.bottom + 2)
        layout.clipped.push(text);
      if (Math.max(rect.width, rect.height) < 8 && text.trim()) layout.small.push(text);
    }
    for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++) {
      const [a, p] = texts[i], [b, q] = texts[j];
      const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (x > 2 && y > 4) layout.overlap.push(`${a} | ${b}`);
    }
  }
  document.getElementById("result").textContent = JSON.stringify(layout);
};
