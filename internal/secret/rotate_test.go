package secret

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"filippo.io/age"

	"github.com/agentlab-vm/agentlab"
)

// full makes a vault with some bundles and what a job was given.
func full(t *testing.T) *Vault {
	t.Helper()
	v := vault(t)
	for _, name := range []string{"a", "b", "c"} {
		set(t, v, name, "env.NAME", "value-of-"+name)
	}
	if err := v.SaveDelivered(t.Context(), "job-1", []string{"value-of-job"}); err != nil {
		t.Fatal(err)
	}
	return v
}

// allReadable fails the test unless everything in v can be read.
func allReadable(t testing.TB, v *Vault) {
	t.Helper()
	for _, name := range []string{"a", "b", "c"} {
		if b, err := v.Deliver(context.Background(), name, nil); err != nil || b.Env["NAME"] != "value-of-"+name {
			t.Errorf("%s: %v, %v", name, b, err)
		}
	}
	if values, ok, err := v.Delivered("job-1"); err != nil || !ok || !slices.Equal(values, []string{"value-of-job"}) {
		t.Errorf("kept: %v %v %v", values, ok, err)
	}
}

func TestRotate(t *testing.T) {
	v := full(t)
	before, err := v.identities()
	if err != nil {
		t.Fatal(err)
	}
	backup, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	old, _ := os.ReadFile(v.path("a"))
	left := filepath.Join(v.dir, ".tmp-left-by-a-kill")
	if err := os.WriteFile(left, []byte(before[0].private), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := v.Rotate(t.Context(), []string{backup.Recipient().String()}, nil)
	if err != nil || !reflect.DeepEqual(r.Bundles, []string{"a", "b", "c"}) || len(r.Kept) != 0 || !reflect.DeepEqual(r.Recipients, []string{backup.Recipient().String()}) {
		t.Fatalf("%+v, %v", r, err)
	}
	allReadable(t, v)
	if _, err := os.Stat(left); err == nil {
		t.Error("what a killed writer left is still there")
	}
	after, err := v.identities()
	if err != nil || len(after) != 1 || after[0].public != r.PublicKey || after[0].public == before[0].public {
		t.Errorf("%d identities, %v", len(after), err)
	}
	files, err := v.encryptedFiles()
	if err != nil || len(files) != 4 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, f := range files {
		sealed, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decrypt(sealed, maxSealed, before); err == nil {
			t.Errorf("the old identity opens %s", f)
		}
		if _, err := age.Decrypt(bytes.NewReader(sealed), backup); err != nil {
			t.Errorf("the backup does not open %s: %v", f, err)
		}
	}
	if _, err := decrypt(old, maxSealed, after); err == nil {
		t.Error("the new identity opens what was encrypted before")
	}
	// A set after it is encrypted to all, too; a removed recipient reads no more.
	set(t, v, "a", "env.NAME", "value-of-a")
	sealed, _ := os.ReadFile(v.path("a"))
	if _, err := age.Decrypt(bytes.NewReader(sealed), backup); err != nil {
		t.Errorf("after a set: %v", err)
	}
	if _, err := v.Rotate(t.Context(), nil, []string{backup.Recipient().String()}); err != nil {
		t.Fatal(err)
	}
	sealed, _ = os.ReadFile(v.path("a"))
	if _, err := age.Decrypt(bytes.NewReader(sealed), backup); err == nil {
		t.Error("who was removed can still read")
	}
	allReadable(t, v)
}

// rotateSteps are those of a rotation of full: identity, recipients, four
// files, done.
const rotateSteps = 7

// steps is a context that a rotation looks at before each of its steps.
type steps struct {
	context.Context
	before func(step int) error // returns what Err returns
	n      int
}

func (s *steps) Err() error {
	s.n++
	return s.before(s.n - 1)
}

// A rotation that dies at any step leaves everything readable, also for a
// process that starts afterwards, and the next one completes it.
func TestRotateKilledAnywhere(t *testing.T) {
	v := full(t)
	all := &steps{t.Context(), func(int) error { return nil }, 0}
	if _, err := v.Rotate(all, []string{"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIFRi8pTSDK2PAyVjqnsEOy7MLoGnM8IZIFXJpDIT1qd"}, nil); err != nil {
		t.Fatal(err)
	}
	if all.n != rotateSteps {
		t.Fatalf("%d steps", all.n)
	}
	for at := range rotateSteps {
		t.Run(strconv.Itoa(at), func(t *testing.T) {
			v := full(t)
			ctx := &steps{t.Context(), func(n int) error {
				if n == at {
					return context.Canceled
				}
				return nil
			}, 0}
			if _, err := v.Rotate(ctx, nil, nil); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
				t.Fatalf("it was not cut short: %v", err)
			}
			v = NewVault(v.dir)
			allReadable(t, v)
			set(t, v, "b", "env.NAME", "value-of-b")
			if _, err := v.Rotate(t.Context(), nil, nil); err != nil {
				t.Fatal(err)
			}
			allReadable(t, v)
			if ids, err := v.identities(); err != nil || len(ids) != 1 {
				t.Errorf("%d identities, %v", len(ids), err)
			}
		})
	}
}

// Readers and writers, each with a Vault of its own as other processes have,
// never notice that keys are rotated.
func TestRotateWithoutDowntime(t *testing.T) {
	v := full(t)
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			mine := NewVault(v.dir)
			for n := 0; ctx.Err() == nil; n++ {
				allReadable(t, mine)
				if i == 0 && n%4 == 0 {
					if err := mine.Set(context.Background(), "a", "env.OTHER", strings.NewReader(fmt.Sprint(n)), false); err != nil {
						t.Error(err)
					}
				}
				if t.Failed() {
					return
				}
			}
		})
	}
	for range 5 {
		if _, err := v.Rotate(t.Context(), nil, nil); err != nil {
			t.Error(err)
		}
	}
	stop()
	wg.Wait()
}

// When something cannot be read, nothing is changed.
func TestRotateRefuses(t *testing.T) {
	v := full(t)
	if err := os.WriteFile(v.path("b"), []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	before, _ := os.ReadFile(v.identityPath())
	_, err := v.Rotate(t.Context(), nil, nil)
	wantCode(t, err, agentlab.CodeInvalid)
	_, err = v.Rotate(t.Context(), []string{"nobody"}, nil)
	wantCode(t, err, agentlab.CodeInvalid)
	_, err = v.Rotate(t.Context(), nil, []string{"age1nobody"})
	wantCode(t, err, agentlab.CodeNotFound)
	if after, _ := os.ReadFile(v.identityPath()); !bytes.Equal(before, after) {
		t.Error("the identity has changed")
	}
}

// Files that others could read or change, or that are not regular files, are
// rejected with the remedy.
func TestModes(t *testing.T) {
	for name, change := range map[string]func(v *Vault) (path string, mode os.FileMode){
		"folder readable":     func(v *Vault) (string, os.FileMode) { return v.dir, 0o750 },
		"folder writable":     func(v *Vault) (string, os.FileMode) { return v.dir, 0o720 },
		"identity readable":   func(v *Vault) (string, os.FileMode) { return v.identityPath(), 0o640 },
		"bundle writable":     func(v *Vault) (string, os.FileMode) { return v.path("a"), 0o620 },
		"recipients writable": func(v *Vault) (string, os.FileMode) { return v.recipientsPath(), 0o602 },
	} {
		t.Run(name, func(t *testing.T) {
			v := full(t)
			if err := v.writeRecipients([]string{"age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"}); err != nil {
				t.Fatal(err)
			}
			path, mode := change(v)
			was, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, mode); err != nil {
				t.Fatal(err)
			}
			err = v.Set(t.Context(), "a", "env.X", strings.NewReader("x"), false)
			wantCode(t, err, agentlab.CodeDenied)
			if want := fmt.Sprintf("chmod %o %s", was.Mode().Perm()&mode, path); agentlab.HintOf(err) != want {
				t.Errorf("hint %q, want %q", agentlab.HintOf(err), want)
			}
			_, found, verr := v.Validate(t.Context(), "", false)
			if verr == nil && len(found) == 0 {
				t.Error("validate finds nothing")
			}
		})
	}
	v := full(t)
	if err := os.Remove(v.path("a")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(v.path("a"), 0o700); err != nil {
		t.Fatal(err)
	}
	wantCode(t, v.Check(t.Context(), "a"), agentlab.CodeInvalid)
}

func TestEdit(t *testing.T) {
	v := full(t)
	text, version, err := v.Text(t.Context(), "a")
	if err != nil || !strings.Contains(text, "value-of-a") {
		t.Fatalf("%q, %v", text, err)
	}
	wantCode(t, v.Replace(t.Context(), "a", "env:\n  A: x\nnonsense: 1\n", version), agentlab.CodeInvalid)
	wantCode(t, v.Replace(t.Context(), "a", "env:\n  A: x\n", ""), agentlab.CodeConflict)
	wantCode(t, v.Replace(t.Context(), "new", "env:\n  A: x\n", version), agentlab.CodeConflict)
	if err := v.Replace(t.Context(), "a", "# mine\nenv:\n  A: cmd:echo x\n  B: literal:cmd:echo x\n", version); err != nil {
		t.Fatal(err)
	}
	b, err := v.Deliver(t.Context(), "a", nil)
	if err != nil || !reflect.DeepEqual(b.Env, map[string]string{"A": "x", "B": "cmd:echo x"}) {
		t.Errorf("%v, %v", b, err)
	}
	wantCode(t, v.Replace(t.Context(), "a", "env: {}\n", version), agentlab.CodeConflict)
	if err := v.Replace(t.Context(), "new", "env:\n  A: x\n", ""); err != nil {
		t.Error(err)
	}
	_, _, err = v.Text(t.Context(), "nobody")
	wantCode(t, err, agentlab.CodeNotFound)
}

// Texts of several lines are shown as such to who edits them.
func TestReadableText(t *testing.T) {
	v := vault(t)
	set(t, v, "a", "git.ssh_private_key", sshKey)
	text, _, err := v.Text(t.Context(), "a")
	if want := "git:\n  \"ssh_private_key\": |\n    -----BEGIN OPENSSH PRIVATE KEY-----\n"; err != nil || !strings.HasPrefix(text, want) {
		t.Errorf("%s, %v", text, err)
	}
}

func TestDelivered(t *testing.T) {
	v := full(t)
	for _, more := range [][]string{{"x", "value-of-job"}, {"x"}, {"y"}} {
		if err := v.SaveDelivered(t.Context(), "job-1", more); err != nil {
			t.Fatal(err)
		}
	}
	if got, ok, err := v.Delivered("job-1"); err != nil || !ok || !slices.Equal(got, []string{"value-of-job", "x", "y"}) {
		t.Errorf("%v %v %v", got, ok, err)
	}
	if _, ok, err := v.Delivered("job-2"); ok || err != nil {
		t.Errorf("%v %v", ok, err)
	}
	if _, _, err := v.Delivered("../identity"); err == nil {
		t.Error("a path is accepted as a job")
	}
	sealed, _ := os.ReadFile(filepath.Join(v.deliveredDir(), "job-1.age"))
	if len(sealed) == 0 || bytes.Contains(sealed, []byte("value-of-job")) {
		t.Error("not encrypted")
	}
	if err := os.WriteFile(filepath.Join(v.deliveredDir(), "job-1.age"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := v.Delivered("job-1"); err == nil {
		t.Error("what is damaged must not be taken for nothing")
	}
	n, err := v.SweepDelivered(t.Context(), func(context.Context, string) (bool, error) { return true, nil })
	if n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}

// A job whose values are forgotten while keys are rotated is no reason for the
// rotation to stop half way.
func TestRotateDuringDeletion(t *testing.T) {
	for at := range rotateSteps {
		v := full(t)
		ctx := &steps{t.Context(), func(n int) error {
			if n != at {
				return nil
			}
			_, err := NewVault(v.dir).SweepDelivered(context.Background(), func(context.Context, string) (bool, error) { return true, nil })
			return err
		}, 0}
		if _, err := v.Rotate(ctx, nil, nil); err != nil {
			t.Errorf("%d: %v", at, err)
		}
		if ids, err := v.identities(); err != nil || len(ids) != 1 {
			t.Errorf("%d: %d identities, %v", at, len(ids), err)
		}
		if _, ok, err := v.Delivered("job-1"); ok || err != nil {
			t.Errorf("%d: kept %v, %v", at, ok, err)
		}
	}
}
