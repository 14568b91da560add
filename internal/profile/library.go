package profile

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
	"github.com/agentlab-vm/agentlab/profiles"
)

// shipped is the Source of a shipped profile.
const shipped = "built-in"

// Library is the profiles in force: the shipped ones and the files NAME.yaml
// of a directory. It reads them again at each call, so an edited file counts at
// once; it may be used from any goroutine.
type Library struct {
	dir      string
	infos    []backend.Info // of the backends, the default first
	names    []string       // of the backends, in the same order
	keys     optionKeys
	private  []agentlab.PrivateTarget
	reserved []uint16
	trusted  []string // certificates of the configuration
}

// NewLibrary returns the library of a directory, which need not exist, for
// the backends that infos describe, the default first. A profile can be used if one of them
// honours every key.
func NewLibrary(dir string, infos ...backend.Info) *Library {
	l := &Library{dir: dir, infos: infos, keys: optionKeys{}}
	for _, info := range infos {
		l.keys.add(info.Name, info.Options)
		l.names = append(l.names, info.Name)
	}
	return l
}

// Names sets the names of the backends, by default those of their drivers. It must be
// called before the library is used.
func (l *Library) Names(names ...string) *Library {
	l.names = names
	return l
}

// Options adds the keys that only some backends have, by the name of the
// backend. A profile with a key of another backend is valid but cannot be used.
// It must be called before the library is used.
func (l *Library) Options(all map[string][]backend.Option) *Library {
	for _, name := range slices.Sorted(maps.Keys(all)) {
		l.keys.add(name, all[name])
	}
	return l
}

// AllowPrivate adds private destinations of the configuration to the policy of
// every profile whose mode is not off. It must be called before the library is
// used.
func (l *Library) AllowPrivate(list []agentlab.PrivateTarget) *Library {
	l.private = list
	return l
}

// ReservePorts sets ports of the host that no profile can allow: those of the
// daemon's own API. It must be called before the library is used.
func (l *Library) ReservePorts(ports ...uint16) *Library {
	l.reserved = ports
	return l
}

// CheckPrivateTargets validates the private destinations that config.yaml allows
// for every sandbox. No sandbox may reach the reserved ports of the host, which
// are those of AgentLab's own API.
func CheckPrivateTargets(list []agentlab.PrivateTarget, reserved []uint16) error {
	all, err := egress.ParsePrivates(list)
	for i, p := range all {
		if p.Host && slices.Contains(reserved, p.Port) {
			return agentlab.Errorf(agentlab.CodeInvalid, "port %d of the host is reserved for AgentLab's API", p.Port).
				WithField(fmt.Sprintf("network.private[%d].port", i))
		}
	}
	return err
}

// Entry is one profile of a library.
type Entry struct {
	Name    string
	Source  string           // path of its file, or "built-in"
	YAML    string           // its text; "" if it could not be read
	Profile agentlab.Profile // only its Name if it does not parse

	// Err is why it cannot be used: it does not parse, or the backend does
	// not honour a key of it. nil means that it can.
	Err error
}

// List returns every profile by name, including unusable ones. The error is
// about the directory as a whole.
func (l *Library) List() ([]Entry, error) {
	found := map[string]Entry{}
	builtIn, err := fs.Glob(profiles.FS, "*.yaml")
	if err != nil {
		return nil, err
	}
	for _, file := range builtIn {
		e := l.builtIn(strings.TrimSuffix(file, ".yaml"))
		found[e.Name] = e
	}
	files, err := os.ReadDir(l.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fsfault.At(l.dir, err)
	}
	for _, f := range files {
		name, isYAML := strings.CutSuffix(f.Name(), ".yaml")
		stem, isYML := strings.CutSuffix(f.Name(), ".yml")
		switch {
		case strings.HasPrefix(f.Name(), "."):
		case isYAML:
			found[name], _ = l.file(name)
		case isYML: // reported, not ignored
			found[f.Name()] = Entry{Name: f.Name(), Source: filepath.Join(l.dir, f.Name()), Profile: agentlab.Profile{Name: f.Name()},
				Err: agentlab.Errorf(agentlab.CodeInvalid, "a profile's file name must be NAME.yaml").WithHint("rename it to %s.yaml", stem)}
		}
	}
	return slices.SortedFunc(maps.Values(found), func(a, b Entry) int { return cmp.Compare(a.Name, b.Name) }), nil
}

// ArtifactTTL returns how long the artifacts of jobs with a profile are stored;
// 0 if the profile does not set it, or does not exist.
func (l *Library) ArtifactTTL(name string) time.Duration {
	e, err := l.Find(name)
	if err != nil {
		return 0
	}
	return e.Profile.ArtifactTTL
}

// Find returns one profile, usable or not; not_found if there is none.
func (l *Library) Find(name string) (Entry, error) {
	if err := agentlab.ValidateName(name); err != nil {
		return Entry{}, err
	}
	if e, ok := l.file(name); ok {
		return e, nil
	}
	if e := l.builtIn(name); !errors.Is(e.Err, fs.ErrNotExist) {
		return e, nil
	}
	all, err := l.List()
	if err != nil {
		return Entry{}, err
	}
	var names []string
	for _, e := range all {
		names = append(names, e.Name)
	}
	e := agentlab.Errorf(agentlab.CodeNotFound, "there is no profile %q", name).WithField("profile")
	if near := strictyaml.Nearest(name, names); near != "" {
		return Entry{}, e.WithHint("did you mean %q?", near)
	}
	return Entry{}, e.WithHint("the profiles are %s", strings.Join(names, ", "))
}

// Use returns a profile for a new sandbox or job, or an error with the reason why it cannot
// be used.
func (l *Library) Use(name string) (agentlab.Profile, error) {
	e, err := l.Find(name)
	if err != nil {
		return agentlab.Profile{}, err
	}
	return e.Profile, e.Err
}

// Usable returns the profiles that Use returns, by name.
func (l *Library) Usable() []agentlab.Profile {
	all, _ := l.List() // none if the directory cannot be read
	var out []agentlab.Profile
	for _, e := range all {
		if e.Err == nil {
			out = append(out, e.Profile)
		}
	}
	return out
}

// Check reads the text of a profile that is in no file. Its Source is "".
func (l *Library) Check(yaml string) Entry { return l.parse("", "", yaml) }

// Put writes or replaces the user's profile with that name. It must parse and
// have that name; the backend need not support every key of it.
func (l *Library) Put(name, yaml string) (Entry, error) {
	if err := agentlab.ValidateName(name); err != nil {
		return Entry{}, err
	}
	path := l.path(name)
	e := l.parse(name, path, yaml)
	if e.Err != nil && agentlab.CodeOf(e.Err) != agentlab.CodeUnsupported {
		return Entry{}, e.Err
	}
	if err := writeFile(path, yaml); err != nil {
		return Entry{}, err
	}
	return e, nil
}

// Remove deletes the user's profile with that name, if its text has that SHA-256 (in
// hexadecimal); conflict if it has another one. Sandboxes and jobs keep the profile that
// they were created with.
func (l *Library) Remove(name, sum string) error {
	if err := agentlab.ValidateName(name); err != nil {
		return err
	}
	path := l.path(name)
	data, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return agentlab.Errorf(agentlab.CodeNotFound, "profile %q has no file", name).WithField("profile")
	}
	if err != nil {
		return fsfault.At(path, err)
	}
	if got := sha256.Sum256(data); hex.EncodeToString(got[:]) != sum {
		return agentlab.Errorf(agentlab.CodeConflict, "profile %q has another text than the one to remove", name).
			WithField("sha256").WithHint("look at it: agentlab profile show %s", name)
	}
	if err := os.Remove(path); err != nil {
		return fsfault.At(path, err)
	}
	return nil
}

func (l *Library) path(name string) string { return filepath.Join(l.dir, name+".yaml") }

// file reads the user's profile with that name; ok is false if there is none.
func (l *Library) file(name string) (e Entry, ok bool) {
	path := l.path(name)
	data, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Entry{}, false
	}
	if err != nil {
		return Entry{Name: name, Source: path, Profile: agentlab.Profile{Name: name}, Err: fsfault.At(path, err)}, true
	}
	return l.parse(name, path, string(data)), true
}

func (l *Library) builtIn(name string) Entry {
	data, err := profiles.FS.ReadFile(name + ".yaml")
	if err != nil {
		return Entry{Name: name, Err: err}
	}
	return l.parse(name, shipped, string(data))
}

// parse returns an Entry; name "" accepts any name in the text.
func (l *Library) parse(name, source, text string) Entry {
	e := Entry{Name: name, Source: source, YAML: text, Profile: agentlab.Profile{Name: name, YAML: text}}
	lists := listsIn(l.dir)
	if source == shipped {
		lists = noLists
	}
	d, err := parse([]byte(text), lists, l.keys)
	if err == nil && name != "" && d.Name != name {
		err = agentlab.Errorf(agentlab.CodeInvalid, "the name %q is not that of the profile's file, %q", d.Name, name).WithField("name").
			WithHint("set name: %s", name)
	}
	if err != nil {
		e.Err = err
		return e
	}
	if err := d.allowPrivate(l.private, l.reserved); err != nil {
		e.Err = d.yaml.At(err)
		return e
	}
	d.trustCertificates(l.trusted)
	e.Name, e.Profile, e.Err = d.Name, d.Profile(), l.usable(d)
	return e
}

// usable is Usable for the backend that a profile names, or for all.
func (l *Library) usable(d *Doc) error {
	if d.Backend == "" {
		return d.Usable(l.infos...)
	}
	i := slices.Index(l.names, d.Backend)
	if i < 0 {
		return agentlab.Errorf(agentlab.CodeUnsupported, "profile %s names backend %s, which the daemon does not have", d.Name, d.Backend).WithField("backend").
			WithHint("use one of %s, or add it to config.yaml and restart agentlabd", strings.Join(l.names, ", "))
	}
	return d.Usable(l.infos[i])
}

// readFile reads a regular file of at most the maximum size of a profile.
func readFile(path string) ([]byte, error) {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		return nil, errors.New("it is not a file")
	case st.Size() > strictyaml.MaxBytes:
		return nil, fmt.Errorf("it has %d bytes, the limit is %d", st.Size(), strictyaml.MaxBytes)
	}
	return os.ReadFile(path)
}

// writeFile replaces a file whole or not at all.
func writeFile(path, text string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fsfault.At(path, err)
	}
	tmp, err := durable.Temp(filepath.Dir(path), ".profile-*", []byte(text))
	if err != nil {
		return fsfault.At(path, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		_ = os.Remove(tmp)
		return fsfault.At(path, err)
	}
	return nil
}
