package e2e

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/sample"
)

// devImage checks in a guest what the image dev promises. Nothing is downloaded.
var devImage = []struct{ name, script, want string }{
	{"versions", `for c in docker docker-compose lazygit gh fzf rg direnv devcontainer n node npm go gcc make python3 sqlite3; do
	case $c in go) arg=version ;; *) arg=--version ;; esac
	$c $arg >/dev/null || echo "$c fails"
done
tmux -V >/dev/null; vim --version >/dev/null; zsh --version >/dev/null; docker compose version >/dev/null
echo all`, "all"},
	{"login shell", `getent passwd agent | cut -d: -f7; zsh -lic 'alias lg; print $DIRENV_CONFIG' 2>/dev/null`, "/usr/bin/zsh\nlg=lazygit\n/etc/direnv"},
	{"git", `git config user.email; git config init.defaultBranch; git config filter.lfs.required`, "agent@agentlab.invalid\nmain\ntrue"},
	{"go build and docker run", `mkdir -p ~/hello && cd ~/hello
printf 'package main\n\nfunc main() { print("from a container") }\n' >main.go
printf 'FROM scratch\nCOPY hello /hello\nENTRYPOINT ["/hello"]\n' >Dockerfile
go mod init hello 2>/dev/null
CGO_ENABLED=0 go build -p 1 -o hello .
docker build -q -t hello . >/dev/null
docker run --rm hello 2>&1`, "from a container"},
	{"docker compose", `cd ~/hello
printf 'services:\n  hello:\n    image: hello\n' >compose.yaml
docker compose up --no-log-prefix 2>&1 | grep -o "from a container"; docker compose down >/dev/null 2>&1`, "from a container"},
	{"docker starts by its socket", `sudo systemctl is-enabled docker.socket docker.service 2>&1`, "enabled\ndisabled"},
	// n gets Node.js from a mirror; this one has the Node.js of the image.
	{"another Node.js", `v=$(node -p process.version) && arch=$(node -p process.arch) && name=node-$v-linux-$arch
mkdir -p ~/mirror/$v ~/mirror/$name/bin && cp /usr/local/bin/node ~/mirror/$name/bin/ && cd ~/mirror
XZ_OPT=-0 tar -cJf $v/$name.tar.xz $name
printf 'version\tdate\tfiles\n%s\t2026-01-01\tlinux-x64\n' $v >index.tab
python3 -m http.server --bind 127.0.0.1 8099 >/dev/null 2>&1 & server=$!
until curl -s http://127.0.0.1:8099/ >/dev/null; do :; done
N_NODE_MIRROR=http://127.0.0.1:8099 n $v >/dev/null
kill $server
test -x ~/.local/bin/node && ~/.local/bin/node -p '"node " + (6*7)'`, "node 42"},
	{"Python", `python3 -m venv ~/venv && ~/venv/bin/python -c 'import sys; print(sys.prefix)'`, "/home/agent/venv"},
	{"Chromium", `printf '<p id=a>no</p><script>document.getElementById("a").textContent = 6*7</script>' >/tmp/page.html
/opt/google/chrome/chrome --headless --no-sandbox --disable-gpu --virtual-time-budget=1000 --dump-dom file:///tmp/page.html 2>/dev/null | grep -o 'id="a">[0-9]*'`, `id="a">42`},
	{"kernel modules", `for m in overlay bridge br_netfilter veth nf_nat kvm kvm_intel kvm_amd; do sudo modprobe -n "$m" || echo "no $m"; done; echo all`, "all"},
}

// withDevImage skips a test with the image dev in most runs.
func withDevImage(t *testing.T) {
	t.Helper()
	sample.OnlyFull(t, "the image dev takes minutes to build")
}

// The image dev has what its recipe promises, and Docker works in its VMs.
func TestDevImage(t *testing.T) {
	withDevImage(t)
	t.Parallel()
	l := newLab(t)
	l.ok("sandbox", "new", "--name", "dev", "--image", "dev", "--cores", "2", "--memory-mb", "4096", "--wait")
	for _, tc := range devImage {
		r := l.run("", "exec", "dev", "--", "bash", "-euo", "pipefail", "-c", tc.script)
		if got := strings.TrimSpace(r.stdout); r.code != 0 || got != tc.want {
			t.Errorf("%s: %v, want %q", tc.name, r, tc.want)
		}
	}
}
