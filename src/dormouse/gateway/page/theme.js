// Before anything is drawn: the theme that was chosen here last.
const chosen = localStorage.getItem("dormouse-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
