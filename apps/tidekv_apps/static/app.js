// Things that need no server: copying, the theme, closing the drawer with Escape, saving an export.
document.addEventListener("click", (event) => {
  const copy = event.target.closest("[data-copy]");
  if (copy) {
    navigator.clipboard.writeText(copy.dataset.copy).then(() => {
      const label = copy.textContent;
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = label), 1200);
    });
  }
  if (event.target.closest("[data-theme-toggle]")) document.body.classList.toggle("dark");
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.querySelector('[data-act="close-viewer"]')?.click();
});
window.tidekvSave = (text, name, type) => {
  if (!text) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};
// The conversation follows the answer, unless the reader has scrolled up.
new MutationObserver(() => {
  const box = document.getElementById("tk-scroll");
  if (!box || box.dataset.followed) return;
  box.dataset.followed = "yes";
  let following = true;
  box.addEventListener("scroll", () => (following = box.scrollHeight - box.scrollTop - box.clientHeight < 60));
  new MutationObserver(() => following && box.scrollTo({ top: box.scrollHeight })).observe(box, {
    childList: true,
    subtree: true,
    characterData: true,
  });
}).observe(document.documentElement, { childList: true, subtree: true });
