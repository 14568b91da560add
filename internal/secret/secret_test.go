package secret

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
)

const sshKey = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n-----END OPENSSH PRIVATE KEY-----"

func vault(t *testing.T) *Vault {
	t.Helper()
	return NewVault(filepath.Join(t.TempDir(), "secrets"))
}

func set(t *testing.T, v *Vault, bundle, key, value string) {
	t.Helper()
	if err := v.Set(t.Context(), bundle, key, strings.NewReader(value), false); err != nil {
		t.Fatal(err)
	}
}

func wantCode(t *testing.T, err error, code agentlab.Code) {
	t.Helper()
	if agentlab.CodeOf(err) != code {
		t.Errorf("got %v, want code %s", err, code)
	}
}

// The secrets in a document are never shown separately, and the name of a model is not
// one of them.
func TestValuesOfDocuments(t *testing.T) {
	b := Bundle{Env: map[string]string{
		"CODEX_AUTH_JSON": `{"tokens": {"access_token": "inner-access", "account_id": "inner-account"}, "last_refresh": "2026"}`,
		"OPENAI_MODEL":    "some-model", "OTHER_MODEL": "other-model",
	}}
	values := b.Values()
	for value, want := range map[string]bool{b.Env["CODEX_AUTH_JSON"]: true, "inner-access": true, "inner-account": true, "2026": false, "some-model": false, "other-model": true} {
		if slices.Contains(values, value) != want {
			t.Errorf("%q: %v, %q", value, !want, values)
		}
	}
}

func TestSetLoadUnset(t *testing.T) {
	v := vault(t)
	set(t, v, "default", "env.ANTHROPIC_API_KEY", "sk-ant-1: #x\n")
	set(t, v, "default", "git.token", "ghp_abc")
	set(t, v, "default", "git.url", "https://github.com")
	set(t, v, "default", "git.ssh_private_key", sshKey)
	set(t, v, "default", "claude_settings_json", `{"env": {"K": "deep-secret"}, "permissions": {"defaultMode": "plan"}}`)
	want := Bundle{
		Git:                Git{URL: "https://github.com", Token: "ghp_abc", SSHPrivateKey: sshKey + "\n"},
		Env:                map[string]string{"ANTHROPIC_API_KEY": "sk-ant-1: #x"},
		ClaudeSettingsJSON: `{"env": {"K": "deep-secret"}, "permissions": {"defaultMode": "plan"}}`,
	}
	got, err := v.Deliver(t.Context(), "default", nil)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("got  %+v, %v\nwant %+v", got, err, want)
	}
	keys, err := v.Keys(t.Context(), "default")
	if wantKeys := []string{"claude_settings_json", "env.ANTHROPIC_API_KEY", "git.ssh_private_key", "git.token", "git.url"}; err != nil || !reflect.DeepEqual(keys, wantKeys) {
		t.Errorf("keys %v, %v", keys, err)
	}
	wantValues := []string{sshKey + "\n", "deep-secret", "ghp_abc", "sk-ant-1: #x", want.ClaudeSettingsJSON}
	if values := got.Values(); !reflect.DeepEqual(values, wantValues) {
		t.Errorf("values %q", values)
	}
	for _, key := range keys {
		if err := v.Unset(t.Context(), "default", key); err != nil {
			t.Error(err)
		}
		wantCode(t, v.Unset(t.Context(), "default", key), agentlab.CodeNotFound)
	}
	got, err = v.Deliver(t.Context(), "default", nil)
	if err != nil || len(got.Keys()) != 0 || len(got.Values()) != 0 {
		t.Errorf("after unset: %+v, %v", got, err)
	}
}

func TestNothingReadableOnDisk(t *testing.T) {
	v := vault(t)
	set(t, v, "default", "git.token", "very-secret-token")
	files, err := os.ReadDir(v.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		st, _ := f.Info()
		if st.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", f.Name(), st.Mode())
		}
		data, _ := os.ReadFile(filepath.Join(v.dir, f.Name()))
		if bytes.Contains(data, []byte("very-secret-token")) {
			t.Errorf("%s holds the secret", f.Name())
		}
		if strings.HasPrefix(f.Name(), ".tmp") {
			t.Errorf("left behind: %s", f.Name())
		}
	}
	if names, err := v.List(); err != nil || !reflect.DeepEqual(names, []string{"default"}) {
		t.Errorf("List: %v, %v", names, err)
	}
}

func TestMissingBundles(t *testing.T) {
	v := vault(t)
	if b, err := v.Deliver(t.Context(), "default", nil); err != nil || len(b.Keys()) != 0 {
		t.Errorf("default: %+v, %v", b, err)
	}
	if _, err := os.Stat(v.dir); err == nil {
		t.Error("reading made the directory")
	}
	_, err := v.Deliver(t.Context(), "other", nil)
	wantCode(t, err, agentlab.CodeNotFound)
	_, err = v.Deliver(t.Context(), "../x", nil)
	wantCode(t, err, agentlab.CodeInvalid)
	if names, err := v.List(); err != nil || len(names) != 0 {
		t.Errorf("List: %v, %v", names, err)
	}
}

func TestIdentity(t *testing.T) {
	v := vault(t)
	set(t, v, "default", "git.token", "t")
	before, _ := os.ReadFile(v.identityPath())
	if err := v.Init(); err != nil {
		t.Fatal(err)
	}
	if after, _ := os.ReadFile(v.identityPath()); !bytes.Equal(before, after) {
		t.Error("Init replaced the identity")
	}
	for _, mode := range []os.FileMode{0o640, 0o604, 0o620} {
		if err := os.Chmod(v.identityPath(), mode); err != nil {
			t.Fatal(err)
		}
		_, err := v.Deliver(t.Context(), "default", nil)
		wantCode(t, err, agentlab.CodeDenied)
		if !strings.Contains(agentlab.HintOf(err), "chmod 600") {
			t.Errorf("hint %q", agentlab.HintOf(err))
		}
	}

	// Another identity, a missing one and a broken one: the bundle stays.
	sealed, _ := os.ReadFile(v.path("default"))
	if err := os.Remove(v.identityPath()); err != nil {
		t.Fatal(err)
	}
	_, err := v.Deliver(t.Context(), "default", nil)
	wantCode(t, err, agentlab.CodeNotFound)
	if err := os.WriteFile(v.identityPath(), []byte("AGE-SECRET-KEY-BROKEN\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = v.Deliver(t.Context(), "default", nil)
	wantCode(t, err, agentlab.CodeInvalid)
	if strings.Contains(err.Error(), "BROKEN") {
		t.Errorf("the error repeats the key: %v", err)
	}
	_ = os.Remove(v.identityPath())
	err = v.Set(t.Context(), "default", "git.token", strings.NewReader("new"), false) // Init makes another identity
	wantCode(t, err, agentlab.CodeInvalid)
	if now, _ := os.ReadFile(v.path("default")); !bytes.Equal(sealed, now) {
		t.Error("a bundle that cannot be read was overwritten")
	}
}

func TestDamagedBundle(t *testing.T) {
	v := vault(t)
	set(t, v, "default", "git.token", "hunter2")
	sealed, _ := os.ReadFile(v.path("default"))
	for _, data := range [][]byte{nil, []byte("x"), sealed[:len(sealed)-1], append(bytes.Clone(sealed[:len(sealed)-3]), 'x', 'y', 'z')} {
		if err := os.WriteFile(v.path("default"), data, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := v.Deliver(t.Context(), "default", nil)
		wantCode(t, err, agentlab.CodeInvalid)
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%v", err)
		}
	}
}

func TestRefusedValues(t *testing.T) {
	v := vault(t)
	for _, tc := range []struct{ key, value, hint string }{
		{"git.token", "", "unset"},
		{"git.token", "two\nlines", ""},
		{"git.tokn", "s3cret", `"git.token"`},
		{"ANTHROPIC_API_KEY", "s3cret", "env.ANTHROPIC_API_KEY"},
		{"env.", "s3cret", ""},
		{"env.A-B", "s3cret", ""},
		{"env.PATH", "s3cret", ""},
		{"env.LD_PRELOAD", "s3cret", ""},
		{"env.A", "s3\x00cret", ""},
		{"env.A", strings.Repeat("s3cret", MaxValueBytes), ""},
		{"env.A", "s3cret\xff", ""},
		{"claude_settings_json", "[\"s3cret\"]", ""},
		{"claude_settings_json", "{s3cret", ""},
		{"git.ssh_private_key", "s3cret", ""},
		{"git.url", "file:///s3cret", "git.token"},
		{"git.url", "ftp://example.com/", "https://"},
		{"git.url", "https://s3cret@example.com/", "git.token"},
	} {
		err := v.Set(t.Context(), "default", tc.key, strings.NewReader(tc.value), false)
		wantCode(t, err, agentlab.CodeInvalid)
		if e, ok := errors.AsType[*agentlab.Error](err); ok && tc.key == "git.url" && e.Field != "git.url" {
			t.Errorf("%s: field %q", tc.key, e.Field)
		}
		if err != nil && (strings.Contains(err.Error()+agentlab.HintOf(err), "s3cret") || !strings.Contains(agentlab.HintOf(err), tc.hint)) {
			t.Errorf("%s: %v, hint %q", tc.key, err, agentlab.HintOf(err))
		}
	}
	if keys, err := v.Keys(t.Context(), "default"); err != nil || len(keys) != 0 {
		t.Errorf("something was set: %v, %v", keys, err)
	}
}

func TestConcurrentSetsLoseNothing(t *testing.T) {
	v := vault(t)
	var wg sync.WaitGroup
	names := []string{"A", "B", "C", "D", "E", "F"}
	for _, n := range names {
		wg.Go(func() {
			if err := v.Set(context.Background(), "default", "env."+n, strings.NewReader("v"+n), false); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	b, err := v.Deliver(t.Context(), "default", nil)
	if err != nil || len(b.Env) != len(names) {
		t.Errorf("%v, %v", b.Keys(), err)
	}
}

// TestAnyTextSurvives: whatever text a secret is, the same comes back, and
// none is taken for a reference.
func TestAnyTextSurvives(t *testing.T) {
	text := rapid.OneOf(
		rapid.String(),
		rapid.StringMatching(`[ \t\r\n#:'"\\|>&*!%@{}\[\],a-z0-9~-]{1,60}`),
		rapid.StringMatching(`(literal:){0,3}(op://|env:|file:|cmd:)?[a-z/ \n]{0,20}`),
	)
	rapid.Check(t, func(t *rapid.T) {
		value := text.Draw(t, "value")
		if checkValue("env.A", value) != nil {
			return
		}
		settings := quote(value)
		in := Bundle{
			Env: map[string]string{"A": storeLiteral(value), "null": "x"}, Git: Git{SSHKnownHosts: storeLiteral(value)},
			ClaudeSettingsJSON: `{"x": ` + settings + `}`, SSHKeys: map[string]string{"example.com": "-PRIVATE KEY-----" + value},
		}
		out, err := in.marshal()
		if err != nil {
			t.Fatalf("%q: %v", value, err)
		}
		got, err := parseBundle(out)
		if err != nil || !slices.Equal(got.entries(), in.entries()) {
			t.Fatalf("%q came back as %q, %v", value, got.Env["A"], err)
		}
		plain, err := resolve(context.Background(), got)
		if err != nil || plain.Env["A"] != value || plain.Git.SSHKnownHosts != value {
			t.Fatalf("%q was delivered as %q, %v", value, plain.Env["A"], err)
		}
	})
}

func TestTokens(t *testing.T) {
	a, hash := MintToken()
	b, _ := MintToken()
	if a == b || len(hash) != 64 || strings.Contains(hash, a) {
		t.Errorf("%q %q %q", a, b, hash)
	}
	if HashToken(a) != hash || HashToken(b) == hash {
		t.Error("not the hash of the token")
	}
	if HashToken("abc") != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" {
		t.Error("not SHA-256 in lower-case hex")
	}
}
