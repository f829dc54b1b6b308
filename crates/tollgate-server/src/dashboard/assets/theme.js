// The theme that the visitor chose, before anything is drawn. Without a choice, the system's.
(() => {
  const chosen = localStorage.getItem('tollgate-theme');
  if (chosen === 'light' || chosen === 'dark') {
    document.documentElement.dataset.theme = chosen;
  }
})();
