package nft

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// loadTimeout limits one transaction.
const loadTimeout = 30 * time.Second

// kernel runs the nft program. It is searched in the PATH of root, regardless
// of the caller's own PATH.
type kernel struct{ program string }

func findNFT() (kernel, error) {
	for _, p := range []string{"/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft", "/usr/local/sbin/nft"} {
		if path, err := exec.LookPath(p); err == nil {
			return kernel{path}, nil
		}
	}
	return kernel{}, agentlab.Errorf(agentlab.CodeUnavailable, "the nft program is not installed").
		WithHint("apt-get install nftables")
}

// load loads text in one transaction.
func (k kernel) load(ctx context.Context, text string) error {
	_, err := k.run(ctx, text, "-f", "-")
	return err
}

// list returns a table as loaded in the kernel, without counters and other
// values that change.
func (k kernel) list(ctx context.Context, family string) (string, error) {
	return k.run(ctx, "", "-s", "list", "table", family, tableName)
}

func (k kernel) run(ctx context.Context, stdin string, args ...string) (string, error) {
	asked := ctx
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.program, args...)
	cmd.Stdin = strings.NewReader(stdin)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	switch {
	case err == nil:
		return out.String(), nil
	case asked.Err() != nil:
		return "", agentlab.Errorf(agentlab.CodeUnknownOutcome, "nft was interrupted: %w", context.Cause(asked))
	case ctx.Err() != nil:
		return "", agentlab.Errorf(agentlab.CodeUnknownOutcome, "nft did not end in %s", loadTimeout)
	case errors.Is(err, exec.ErrNotFound):
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "the nft program was removed").WithHint("apt-get install nftables")
	case strings.Contains(errs.String(), "Operation not permitted"):
		return "", agentlab.Errorf(agentlab.CodeDenied, "this user has no permission to change the firewall").WithHint("run it as root")
	}
	first, _, _ := strings.Cut(strings.TrimSpace(errs.String()), "\n")
	return "", agentlab.Errorf(agentlab.CodeInternal, "nft rejected the rules: %s", fmt.Sprintf("%.300s", first))
}

// hasBridgeMeta reports whether the kernel supports a rule with the bridge of
// a frame. The rule is only checked, not loaded.
func (k kernel) hasBridgeMeta(ctx context.Context) bool {
	const text = "table bridge agentlab_question {\n\tchain c {\n\t\ttype filter hook forward priority 0\n\t\tmeta ibrname \"x\" drop\n\t}\n}\n"
	_, err := k.run(ctx, text, "-c", "-f", "-")
	return err == nil
}
