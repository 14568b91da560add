package cli_test

import (
	"strings"
	"testing"
)

// The command lines that the specifications of the product name are those of this program,
// with a value for each placeholder. The specifications have other names
// for the commands of sessions (agent-sessionizer, keystone agent).
func TestSpecifiedCommands(t *testing.T) {
	t.Parallel()
	for _, line := range strings.Split(strings.TrimSpace(`
agentlab --version
agentlab status
agentlab sandbox new --profile yolo-workspace --repo https://example.com/r.git --ref main --keepalive --workspace foo
agentlab sandbox new --stateful
agentlab sandbox list
agentlab sandbox show 1001
agentlab sandbox lease renew 1001 --ttl 4h
agentlab sandbox destroy 1001
agentlab sandbox pause 1001
agentlab sandbox resume 1001
agentlab sandbox snapshot save 1001 --name snap
agentlab sandbox snapshot restore 1001 --name snap
agentlab sandbox doctor 1001 --out bundle.tar.gz
agentlab workspace create --name foo --size 80G
agentlab workspace list
agentlab workspace attach foo 1001
agentlab workspace detach foo
agentlab workspace rebind foo --profile yolo-workspace
agentlab workspace snapshot create foo --name snap
agentlab workspace snapshot list foo
agentlab workspace snapshot restore foo --name snap
agentlab workspace fork foo --name bar
agentlab workspace fork foo --name bar --from-snapshot snap
agentlab workspace check foo
agentlab workspace fsck foo
agentlab workspace fsck foo --repair
agentlab job run --repo https://example.com/r.git --task text --profile yolo-ephemeral
agentlab job run --repo . --task text --workspace foo
agentlab job run --repo . --task text --workspace new:foo --workspace-size 80G --workspace-storage local-zfs
agentlab job run --repo . --task text --workspace foo --workspace-wait 10m
agentlab job run --repo . --task text --stateful
agentlab job run --repo . --task text --branch fix
agentlab job show job-aaaaaaaaaaaaa --events-tail 20
agentlab job artifacts job-aaaaaaaaaaaaa
agentlab job artifacts download job-aaaaaaaaaaaaa --out file
agentlab job doctor job-aaaaaaaaaaaaa --out bundle.tar.gz
agentlab logs 1001 --follow
agentlab ssh 1001
agentlab msg post --workspace foo --kind note --text "..."
agentlab msg tail --workspace foo
agentlab msg tail --job job-aaaaaaaaaaaaa
agentlab msg tail --session fix
agentlab msg export --session fix
agentlab msg export --workspace foo
agentlab msg import --workspace foo messages.jsonl
agentlab session create --name fix --profile yolo-workspace --workspace new:fix --size 80G
agentlab session list
agentlab session show fix
agentlab session resume fix --ttl 4h --keepalive
agentlab session stop fix
agentlab session fork fix --name other --from-snapshot snap
agentlab session branch feature/login
agentlab session doctor fix --out bundle.tar.gz
agentlab init
agentlab init --apply
agentlab init --smoke-test
agentlab sessionizer
agentlab sessionizer owner/repo
agentlab sessionizer --list
agentlab sessionizer --stop owner/repo
agentlab sessionizer --destroy owner/repo
agentlab start
agentlab start --fresh
agentlab attach
agentlab sync
agentlab sync --artifacts
agentlab open vscode`), "\n") {
		if err := (documentCommand{text: line}).check(); err != nil {
			t.Errorf("%s: %v", line, err)
		}
	}
}
