package secret

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

const sopsPlain = "git:\n    token: ghp_of_sops\nenv:\n    A: |\n        two\n        lines\n    REF: cmd:echo from a reference\n"

// sopsVault makes a vault with an identity and the plain text of a bundle.
func sopsVault(t *testing.T) (v *Vault, plain string) {
	t.Helper()
	v = vault(t)
	if err := v.Init(); err != nil {
		t.Fatal(err)
	}
	plain = filepath.Join(t.TempDir(), "plain.yaml")
	if err := os.WriteFile(plain, []byte(sopsPlain), 0o600); err != nil {
		t.Fatal(err)
	}
	return v, plain
}

func checkSops(t *testing.T, v *Vault) {
	t.Helper()
	got, err := v.Deliver(t.Context(), "team", nil)
	want := Bundle{Git: Git{Token: "ghp_of_sops"}, Env: map[string]string{"A": "two\nlines\n", "REF": "from a reference"}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("got  %+v, %v\nwant %+v", got, err, want)
	}
	all, err := v.Bundles(t.Context())
	if err != nil || len(all) != 1 || all[0].Format != FormatSops || !reflect.DeepEqual(all[0].Keys, []string{"env.A", "env.REF", "git.token"}) {
		t.Errorf("%+v, %v", all, err)
	}
	err = v.Set(t.Context(), "team", "env.A", strings.NewReader("x"), false)
	wantCode(t, err, agentlab.CodeUnsupported)
	if want := "sops " + v.sopsPath("team"); !strings.Contains(agentlab.HintOf(err), want) {
		t.Errorf("hint %q", agentlab.HintOf(err))
	}
	_, _, err = v.Text(t.Context(), "team")
	wantCode(t, err, agentlab.CodeUnsupported)
}

// A bundle of the real sops, encrypted to the vault's own key, can be read,
// and its key outlives rotations until the bundle is encrypted to the new one.
func TestSops(t *testing.T) {
	sops, err := exec.LookPath("sops")
	if err != nil {
		t.Skip("skipped: the program sops is not installed; TestSopsFake checks our side of it")
	}
	v, plain := sopsVault(t)
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(sops, args...)
		cmd.Env = append(os.Environ(), "SOPS_AGE_KEY_FILE="+v.identityPath())
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		return string(out)
	}
	own, _, err := v.Public()
	if err != nil {
		t.Fatal(err)
	}
	sealed := run("--encrypt", "--age", own, plain)
	if strings.Contains(sealed, "ghp_of_sops") {
		t.Fatal("not encrypted")
	}
	if err := os.WriteFile(v.sopsPath("team"), []byte(sealed), 0o600); err != nil {
		t.Fatal(err)
	}
	checkSops(t, v)
	r, err := v.Rotate(t.Context(), nil, nil)
	if err != nil || !reflect.DeepEqual(r.Kept, []string{own}) {
		t.Fatalf("%+v, %v", r, err)
	}
	checkSops(t, v)
	run("rotate", "--in-place", "--add-age", r.PublicKey, "--rm-age", own, v.sopsPath("team"))
	r, err = v.Rotate(t.Context(), nil, nil)
	if err != nil || len(r.Kept) != 1 || r.Kept[0] == own {
		t.Fatalf("%+v, %v", r, err)
	}
	checkSops(t, v)
}

// A strict stand-in for sops: how we call it, and what we make of its faults.
func TestSopsFake(t *testing.T) {
	v, plain := sopsVault(t)
	if err := os.WriteFile(v.sopsPath("team"), []byte("sops: encrypted\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Run("not installed", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		wantCode(t, v.Check(t.Context(), "team"), agentlab.CodeUnsupported)
	})
	t.Run("good", func(t *testing.T) {
		script(t, "sops", `[ "$*" = "--decrypt --input-type yaml --output-type yaml `+v.sopsPath("team")+`" ] || exit 64
[ "$SOPS_AGE_KEY_FILE" = "`+v.identityPath()+`" ] || exit 65
[ -z "$(cat)" ] && cat `+plain)
		checkSops(t, v)
	})
	t.Run("fails", func(t *testing.T) {
		script(t, "sops", "echo s3cret; echo s3cret >&2; exit 128")
		err := v.Check(t.Context(), "team")
		wantCode(t, err, agentlab.CodeUnavailable)
		if strings.Contains(err.Error()+agentlab.HintOf(err), "s3cret") {
			t.Errorf("%v", err)
		}
	})
	t.Run("prints nonsense", func(t *testing.T) {
		script(t, "sops", "echo s3cret: s3cret")
		err := v.Check(t.Context(), "team")
		wantCode(t, err, agentlab.CodeInvalid)
	})
	t.Run("writable by others", func(t *testing.T) {
		if err := os.Chmod(v.sopsPath("team"), 0o620); err != nil {
			t.Fatal(err)
		}
		wantCode(t, v.Check(t.Context(), "team"), agentlab.CodeDenied)
		if err := os.Chmod(v.sopsPath("team"), 0o600); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("there twice", func(t *testing.T) {
		if err := v.seal(v.path("team"), nil); err != nil {
			t.Fatal(err)
		}
		wantCode(t, v.Check(t.Context(), "team"), agentlab.CodeConflict)
	})
}
