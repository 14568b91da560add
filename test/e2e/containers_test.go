package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
)

// pythonImage makes a container image of the VM's own Python: no registry can be reached.
// A VM is READY before its services run.
const pythonImage = `set -euo pipefail
timeout 300 bash -c 'until docker version >/dev/null 2>&1; do :; done'
tar -C / -ch usr/bin/python3 usr/lib/python3.11 lib64/ld-linux-x86-64.so.2 $(ldd /usr/bin/python3 | grep -o '/lib/[^ ]*' | cut -c2-) | docker import - local/python
tar -C /run/agentlab/bin -ch agent-runner | docker import - local/probe`

// A container in a VM is limited by the network policy as the VM is, and a port that it
// publishes is served like any other. A browser of the image runs a page by Playwright.
func TestContainers(t *testing.T) {
	withDevImage(t)
	t.Parallel()
	p := newProbeLab(t, "--image", "dev", "--cores", "2", "--memory-mb", "3072")
	p.sh(pythonImage)
	p.Run("policy", func(t *testing.T) { p.with(t).checkContainerPolicy() })
	p.Run("port", func(t *testing.T) {
		l := p.with(t)
		l.sh(`docker run --detach --name web --publish 33790:33790 local/python python3 -c "$1" 33790 0.0.0.0 contained`, devServer)
		got, c := l.served(33790), hostBrowser(t)
		var status int
		var body string
		l.eventually("the server in the container answers", func() bool { // Docker listens before it
			status, body = fetch(t, c, got.URL)
			return status != 502
		})
		if got.URL != "http://"+probed+".sandbox.localhost:33790/" || status != 200 || !strings.HasPrefix(body, "contained at "+probed+".") {
			t.Errorf("%s: %d %q", got.URL, status, body)
		}
	})
	p.Run("playwright", func(t *testing.T) { p.with(t).checkPlaywright() })
}

// with returns the lab for a subtest.
func (p *probeLab) with(t *testing.T) *probeLab {
	l := *p.lab
	l.TB = t
	return &probeLab{lab: &l, net: p.net}
}

// Run runs a subtest.
func (p *probeLab) Run(name string, fn func(t *testing.T)) { p.TB.(*testing.T).Run(name, fn) }

// sh runs a script in the sandbox.
func (p *probeLab) sh(script string, args ...string) string {
	p.Helper()
	return p.ok(append([]string{"exec", probed, "--", "bash", "-c", script, "sh"}, args...)...)
}

// checkContainerPolicy compares the probe table of a container with that of its VM. A
// container has no IPv6 and sends no frames of its own on the network of the VM.
func (p *probeLab) checkContainerPolicy() {
	p.Helper()
	inside := p.probesBy("exec", "-i", probed, "--", "docker", "run", "--interactive", "--rm", "local/probe", "/agent-runner", "probe")
	for _, v := range probetest.Reference() {
		if v.Name != "nat" && v.Name != "allowlist" && v.Name != "off" {
			continue
		}
		vm := map[string]probe.Outcome{}
		var ids []string
		for _, o := range p.table(v, 15).Outcomes {
			if o.Status == probe.Pass && !o.Check.IPv6 && !strings.Contains(o.Check.ID, "spoof") {
				vm[o.Check.ID], ids = o, append(ids, o.Check.ID)
			}
		}
		rep := p.tableBy(inside, v, 15, ids...)
		for _, o := range probetest.Failures(rep) {
			p.Errorf("%s: %s (%s): %s; in the VM it passes", v.Name, o.Check.ID, o.Check.Shows, o.Detail)
		}
		p.Logf("%s: %d rows pass in the VM, of them in a container: %d passed, %d failed, %d skipped", v.Name, len(vm), rep.Passed, rep.Failed, rep.Skipped)
	}
}

// playwrightScript opens a page of the container's server and prints what a script of
// the page computes.
const playwrightScript = `const {chromium} = require('playwright-core');
(async () => {
  const browser = await chromium.launch({executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu'], timeout: 600000});
  const page = await browser.newPage();
  page.setDefaultTimeout(600000);
  await page.goto('http://127.0.0.1:33790/');
  console.log(await page.evaluate(() => document.body.innerText + ' ' + (6 * 7)));
  await browser.close();
})().catch(e => { console.error(e); process.exit(1); });`

// checkPlaywright runs the npm package, which the host installs, in the VM with the
// image's Chromium.
func (p *probeLab) checkPlaywright() {
	p.Helper()
	dir := filepath.Join(p.TempDir(), "pw")
	if err := os.Mkdir(dir, 0o700); err != nil {
		p.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "page.js"), []byte(playwrightScript), 0o600); err != nil {
		p.Fatal(err)
	}
	if out, err := exec.Command("npm", "install", "--prefix", dir, "--no-audit", "--no-fund", "--ignore-scripts", "playwright-core@1.56.1").CombinedOutput(); err != nil {
		p.Fatalf("npm: %v\n%s", err, out)
	}
	p.ok("cp", dir, probed+":/home/agent/pw")
	if got := strings.TrimSpace(p.sh("cd ~/pw && node page.js")); !strings.HasPrefix(got, "contained at 127.0.0.1:33790") || !strings.HasSuffix(got, " 42") {
		p.Errorf("the page: %q", got)
	}
}
