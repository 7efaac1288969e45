// Write the layout of the page in the frame `page` as JSON into the element `result`.
const frame = document.getElementById("page"), layout = {};
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  layout.overflow_px = root.scrollWidth - root.clientWidth;
  layout.titles = [...page.querySelectorAll("h2")].map(e => e.textContent);
  layout.headline = page.querySelector("h1").textContent;
  layout.num_scripts = page.querySelectorAll("script, iframe, [onclick], [onload], [onerror]").length;
  layout.clipped_texts = []; layout.overlapping_texts = []; layout.num_pictures = 0; layout.small_texts = [];
  for (const svg of page.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    if (!box.width) continue;
    layout.num_pictures += 1;
    const texts = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
    for (const [text, rect] of texts) {
      if (rect.left < box.left - 2 || rect.right > box.right + 2 || rect.top < box.top - 2 || rect.bottom > box.bottom + 2)
        layout.clipped_texts.push(text);
      if (Math.max(rect.width, rect.height) < 8 && text.trim()) layout.small_texts.push(text);
    }
    for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++) {
      const [a, p] = texts[i], [b, q] = texts[j];
      const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (x > 2 && y > 4) layout.overlapping_texts.push(`${a} | ${b}`);
    }
  }
  document.getElementById("result").textContent = JSON.stringify(layout);
};
