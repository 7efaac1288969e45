// What a browser makes of the page in the frame `page`, as JSON into the element `seen`.
const of = document.getElementById("page"), seen = {};
of.onload = () => {
  const page = of.contentDocument, root = page.documentElement;
  seen.overflow = root.scrollWidth - root.clientWidth;
  seen.titles = [...page.querySelectorAll("h2")].map(e => e.textContent);
  seen.headline = page.querySelector("h1").textContent;
  seen.scripts = page.querySelectorAll("script, iframe, [onclick], [onload], [onerror]").length;
  seen.clipped = []; seen.overlap = []; seen.pictures = 0; seen.small = [];
  for (const svg of page.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect();
    if (!box.width) continue;
    seen.pictures += 1;
    const texts = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
    for (const [text, at] of texts) {
      if (at.left < box.left - 2 || at.right > box.right + 2 || at.top < box.top - 2 || at.bottom > box.bottom + 2)
        seen.clipped.push(text);
      if (Math.max(at.width, at.height) < 8 && text.trim()) seen.small.push(text);
    }
    for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++) {
      const [a, p] = texts[i], [b, q] = texts[j];
      const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (x > 2 && y > 4) seen.overlap.push(`${a} | ${b}`);
    }
  }
  document.getElementById("seen").textContent = JSON.stringify(seen);
};
