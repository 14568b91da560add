package pve

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/agentlab-vm/agentlab/test/guard"
)

const destroyTask = "UPID:pve:00002511:000404FA:6B00F94F:qmdestroy:101:root@pam:"

// pvesh has waited for its task, and prints an error unless the task succeeded.
func TestEndedTaskNeedsNoCall(t *testing.T) {
	for name, c := range map[string]struct {
		stderr string
		ended  bool
	}{
		"succeeded":  {"", true},
		"failed":     {"VM is locked (backup)", false},
		"killed":     {"got unexpected control message: ", false},
		"a warning":  {"Task finished with 1 warning(s)!", false},
		"other text": {"perl: warning: Setting locale failed.", false},
	} {
		t.Run(name, func(t *testing.T) {
			said := filepath.Join(t.TempDir(), "stderr")
			if err := os.WriteFile(said, []byte(c.stderr), 0o600); err != nil {
				t.Fatal(err)
			}
			client := shellClient(t, `case $1 in
get) echo '{"status":"stopped","exitstatus":"VM is locked (backup)"}';;
*) echo "Could not remove disk 'local:vm-101-disk-1', check manually: busy"; echo 'transferred 1 of 2'; echo; echo '"`+destroyTask+`"'; cat '`+said+`' >&2;;
esac`)
			ctx := guard.Context(t)
			task, err := client.Destroy(ctx, "pve", 101, false)
			if err != nil || task != destroyTask {
				t.Fatalf("%s, %v", task, err)
			}
			if client.Ended(task) != c.ended {
				t.Fatalf("ended: %v", !c.ended)
			}
			if !c.ended {
				return
			}
			left, err := client.NotRemoved(ctx, task)
			if err != nil || !slices.Equal(left, []string{"local:vm-101-disk-1"}) || client.Calls() != 1 {
				t.Errorf("%v, %v after %d calls", left, err, client.Calls())
			}
		})
	}
}

// The tasks that are remembered do not grow in number.
func TestEndedTasksAreForgotten(t *testing.T) {
	var e endedTasks
	for range 3 * maxEnded {
		e.note([]byte(`"`+destroyTask+`"`), []byte("log\n\""+destroyTask+"\"\n"))
	}
	e.note([]byte("null"), nil)
	if len(e.all) != maxEnded || !slices.Equal(e.all[0].log, []string{"log"}) {
		t.Errorf("%d tasks, the first with %q", len(e.all), e.all[0].log)
	}
}
