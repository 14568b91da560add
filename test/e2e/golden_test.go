package e2e

import (
	"strings"
	"testing"
)

// The shipped profiles for short tasks and for code that is not trusted run a job as
// they are. internal/cli/testdata/script/golden.txtar has all shipped profiles.
func TestGoldenProfiles(t *testing.T) {
	t.Parallel()
	l, _ := newNetLab(t)
	l.secret("env.ANTHROPIC_AUTH_TOKEN", "sk-test-anthropic")
	for profile, want := range map[string][]string{
		"fast-dev":       {"find the model key: yes", "become root: yes", "write to /etc: yes"},
		"safe-untrusted": {"find the model key: no", "become root: no", "write to /etc: no", "work in the repository: yes"},
	} {
		j, r := l.job("--profile", profile, "--repo", sampleRepo(t), "--agent", "shell", "--task", "BOXED=\n"+innerLook)
		log := l.ok("job", "logs", j.ID)
		if j.Status != "COMPLETED" {
			t.Errorf("%s: %+v\n%v\nlog:\n%s", profile, j, r, log)
		}
		for _, line := range want {
			if !strings.Contains(log, line+"\n") {
				t.Errorf("%s: no line %q in the log:\n%s", profile, line, log)
			}
		}
	}
}
