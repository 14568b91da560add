package qemu

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/backend"
)

// awaitTemplate waits until the driver has made a template.
func awaitTemplate(t testing.TB, d *Driver) {
	t.Helper()
	eventually(t, 2*bootTimeout, "a template is made", func() error {
		names, err := filepath.Glob(filepath.Join(d.tmpl.dir, "[0-9a-f]*"))
		if err == nil && len(names) == 0 {
			err = errors.New("there is none")
		}
		return err
	})
}

// The second sandbox of a kind starts as a copy of a template: it answers at
// once, has an identity of its own, and its disk is its own.
func TestStartFromTemplate(t *testing.T) {
	f := vmFixture(t)
	f.TemplateBytes = 1 << 30
	b := newBox(t, f, nil)
	t.Cleanup(func() { _ = b.d.Close() })
	b.boot()
	awaitTemplate(t, b.d)
	sp := f.spec(2)
	b.ok(b.d.Create(b.ctx, sp))
	if _, err := os.Stat(filepath.Join(b.d.dir(sp.Ref()), fileMemoryState)); err != nil {
		t.Fatal(err)
	}
	second := &box{TB: t, f: f, d: b.d, ref: sp.Ref(), ctx: b.ctx}
	began := time.Now()
	second.boot()
	t.Logf("the second sandbox answered after %s", time.Since(began))
	second.identify()
	h, err := second.client().Health(b.ctx)
	b.ok(err)
	t.Logf("%+v", h)
	if out := second.output("cat /etc/hostname; touch /root/here; sync; echo $(( $(cut -d. -f1 /proc/uptime) ))"); true {
		t.Logf("%s", out)
	}
	if _, err := os.Stat(filepath.Join(b.d.dir(sp.Ref()), fileMemoryState)); !os.IsNotExist(err) {
		t.Errorf("the memory is still there: %v", err)
	}
	in, err := b.d.Inspect(b.ctx, sp.Ref())
	if err != nil || in.Power != backend.PowerRunning {
		t.Errorf("%+v, %v", in, err)
	}
}
