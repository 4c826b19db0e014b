const send = (node, act) => {
  const box = node.matches("input") ? node : node.parentElement.querySelector("input[data-submit]");
  trigger("click", { act: act, arg: node.dataset.arg || "", value: box ? box.value : "" });
};
element.addEventListener("click", (event) => {
  const node = event.target.closest("[data-act]");
  if (node && element.contains(node)) send(node, node.dataset.act);
});
element.addEventListener("change", (event) => {
  if (event.target.dataset.submit === "pages") send(event.target, "pages");
});
element.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.dataset.submit === "unlock") send(event.target, "unlock");
});
watch("value", () => element.querySelector(".tk-drawer")?.focus());
