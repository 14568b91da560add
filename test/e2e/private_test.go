package e2e

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/fakellm"
	"github.com/agentlab-vm/agentlab/test/netlab"
)

// A private network with a model gateway, in namespaces: its address, its name,
// and a machine beside it.
const (
	gatewayAddr = "10.1.2.3"
	gatewayName = "gateway.corp"
	besideAddr  = "10.1.2.4"
)

// newPrivateLab is a lab whose daemon is on a host with a private network, in
// namespaces of the test's own. The host's way to everything is a peer that
// answers at every address.
func newPrivateLab(t *testing.T) (*lab, *netlab.Peer) {
	t.Helper()
	netlab.Sh(t, "ip link add vmbr0 type bridge; ip addr add 192.168.1.2/24 dev vmbr0; ip link set vmbr0 up; ip route add default via 192.168.1.1")
	peer := netlab.NewPeer(t, "corp0", "vmbr0", "192.168.1.1/24")
	netlab.Resolver(t, netip.MustParseAddr("192.31.196.200"))
	peer.Net.SetName(gatewayName, netip.MustParseAddr(gatewayAddr))
	peer.Net.SetName("beside.corp", netip.MustParseAddr(besideAddr))
	peer.Net.SetName("metadata.corp", netip.MustParseAddr("169.254.169.254"))
	for _, name := range []string{"beside.corp", "metadata.corp"} {
		peer.Net.HandleHTTP(name, 4000, says("secret of the network"))
	}
	return newLab(t), peer
}

func says(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(text + "\n")) })
}

// A real agent's job with a model on a private address is refused, and ends
// soon when it is started all the same; with the operator's entry in the
// profile it does its work.
func TestPrivateModelGateway(t *testing.T) {
	t.Parallel()
	prepare(t)
	if !netlab.IsInside(t) { // where nothing can be downloaded
		newLabIn(t, newHome(t)).ok("image", "build", "agents")
	}
	if !netlab.Inside(t) {
		return
	}
	l, peer := newPrivateLab(t)
	llm := fakellm.New(agentScript...)
	peer.Net.HandleHTTP(gatewayName, 4000, llm)
	if r := l.runInput("", strings.NewReader("sk-test-anthropic"), "login", "claude", "--base-url", "http://"+gatewayAddr+":4000/v1"); r.code != 0 || !strings.Contains(r.stderr, "no profile allows "+gatewayAddr+":4000 yet") {
		t.Fatalf("login: %v", r)
	}
	l.profile("closed", "name: closed\nsecrets_bundle: default\n")
	l.profile("opened", "name: opened\nsecrets_bundle: default\nnetwork: {private: [{host: "+gatewayAddr+", port: 4000, reason: our model gateway}]}\n")
	repo := sampleRepo(t)
	args := []string{"--repo", repo, "--agent", "claude", "--task", "Fix the greeting so that its test passes, and commit."}

	r := l.run("", append([]string{"job", "run", "--profile", "closed"}, args...)...)
	if r.code != 1 || !strings.Contains(r.stderr, "denied by rule always.private") || !strings.Contains(r.stderr, "network.private: {host: "+gatewayAddr) {
		t.Errorf("without the entry: %v", r)
	}
	t.Logf("denied before it starts:\n%s", r.stderr)
	j, r := l.job(append([]string{"--profile", "closed", "--no-preflight"}, args...)...)
	wantModelDenied(t, l, gatewayAddr+":4000", "always.private", j.Status, j.Reason)
	t.Logf("denied while it runs:\n%s", r.stderr)
	if n := len(llm.Requests()); n > 0 {
		t.Errorf("%d requests came to the model that is denied", n)
	}

	j, r = l.job(append([]string{"--profile", "opened"}, args...)...)
	if j.Status != "COMPLETED" || j.Result.Commits != 1 {
		t.Fatalf("%+v\n%v\nlog:\n%s\nrequests: %+v", j, r, tail(l.ok("job", "logs", j.ID), 60), llm.Requests())
	}
	rule := "private:" + gatewayAddr + ":4000"
	for _, show := range [][]string{{"policy", "show", "--profile", "opened"}, {"job", "show", j.ID}, {"egress", "log", "--job", j.ID}} {
		out := l.ok(show...)
		if !strings.Contains(out, gatewayAddr+":4000") || show[0] != "policy" && !strings.Contains(out, rule) {
			t.Errorf("%v does not name the private destination:\n%s", show, out)
		}
		t.Logf("%v\n%s", show, out)
	}
	l.noSandboxes()
}

// What the operator opened is reached by name and on the host, and nothing
// beside it: not another port, address or name, and not what a name resolves to
// against the operator's meaning.
func TestPrivateDestinations(t *testing.T) {
	t.Parallel()
	prepare(t)
	if !netlab.Inside(t) {
		return
	}
	l, peer := newPrivateLab(t)
	peer.Net.HandleHTTP(gatewayName, 4000, says("the gateway answers"))
	peer.Net.HandleHTTP(gatewayName, 8080, says("another port answers"))
	for _, at := range []string{"127.0.0.1:11434", "127.0.0.1:11435", "192.168.1.2:4000"} {
		srv, err := net.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		go func() { _ = http.Serve(srv, says("the host answers")) }()
		t.Cleanup(func() { _ = srv.Close() })
	}
	peer.Net.SetName("self.corp", netip.MustParseAddr("192.168.1.2"))
	l.profile("opened", `name: opened
network:
  private:
    - {host: gateway.corp, port: 4000, reason: models}
    - {host: metadata.corp, port: 4000, reason: a name that goes astray}
    - {host: self.corp, port: 4000, reason: a name of the host}
    - {host: host.agentlab.internal, port: 11434, reason: Ollama}
`)
	script := "get() { echo \"$1: $(curl -sS -m 8 http://$1/ 2>&1 | tail -1)\"; }\n"
	for _, target := range []string{
		"gateway.corp:4000", "host.agentlab.internal:11434", "gateway.corp:8080", "beside.corp:4000", besideAddr + ":4000",
		"metadata.corp:4000", "169.254.169.254:4000", "self.corp:4000", "host.agentlab.internal:11435",
	} {
		script += "get " + target + "\n"
	}
	j, r := l.job("--profile", "opened", "--agent", "shell", "--task", script)
	log := l.ok("job", "logs", j.ID)
	if j.Status != "COMPLETED" {
		t.Fatalf("%+v\n%v\n%s", j, r, log)
	}
	t.Logf("in the guest:\n%s", log)
	for _, want := range []string{"gateway.corp:4000: the gateway answers", "host.agentlab.internal:11434: the host answers"} {
		if !strings.Contains(log, want) {
			t.Errorf("%q is missing", want)
		}
	}
	if n := strings.Count(log, " answers") + strings.Count(log, "secret of"); n != 2 {
		t.Errorf("%d targets answered, want 2", n)
	}
	t.Logf("records:\n%s", l.ok("egress", "log", "--job", j.ID))
	l.noSandboxes()
}
