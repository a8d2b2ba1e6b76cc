// Dark or light, before anything is drawn. A plain script: a module would come too late.
(() => {
  const NAME = "baton-theme";
  const ORDER = ["auto", "light", "dark"];
  const root = document.documentElement;
  const read = () => {
    try {
      const stored = localStorage.getItem(NAME);
      return ORDER.includes(stored) ? stored : "auto";
    } catch {
      return "auto"; // storage is forbidden here: the choice lasts as long as the page
    }
  };
  let theme = read();
  const show = () => {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (!button) return;
    button.setAttribute("aria-label", `Theme: ${theme}`);
    document.getElementById("theme-name").textContent = theme;
  };
  show();
  document.addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme").addEventListener("click", () => {
      theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
      try {
        localStorage.setItem(NAME, theme);
      } catch {
        // As above.
      }
      show();
    });
  });
})();
