// Applies the selected theme before the page is drawn; the default is the system's.
(() => {
  const chosen = localStorage.getItem('sluicegate-theme');
  if (chosen === 'light' || chosen === 'dark') {
    document.documentElement.dataset.theme = chosen;
  }
})();
