package runner

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Files of the system that useCache writes.
const (
	aptCacheFile = "/etc/apt/apt.conf.d/00agentlab-cache" // read first, so that other files override it
	dockerFile   = "/etc/docker/daemon.json"
	pipFile      = "/etc/pip.conf"
)

// useCache configures package managers for the registry cache. It writes only the
// files with the lowest precedence, and no setting that such a file already has:
// settings of the image, the project, the environment and the user win. A package
// manager that cannot be configured asks its registry. What an earlier run has
// written for a kind that is not cached now is removed: the sandbox may be the copy
// of one with another profile.
func (r *Runner) useCache(ctx context.Context) {
	c := r.resp.Cache
	if c == nil {
		c = &guestapi.RegistryCache{URL: r.api.base}
	}
	base, err := url.Parse(c.URL)
	if err != nil || base.Host == "" {
		r.log.Error("the registry cache is not used", "err", "its URL is not valid")
		return
	}
	for _, kind := range []string{"npm", "go", "pypi", "apt", "docker"} {
		use := r.dropCacheFor
		if slices.Contains(c.Kinds, kind) {
			use = r.useCacheFor
		}
		if err := use(ctx, kind, base); err != nil {
			r.log.Warn("a package manager is not configured for the registry cache", "kind", kind, "err", err)
		}
	}
}

// cacheSetting returns the file in the home with the setting of a package manager,
// the key of the setting, and its text. The file is "" for others.
func (r *Runner) cacheSetting(kind string, base *url.URL) (file, key, text string) {
	at := base.JoinPath(guestapi.PathCache, kind).String()
	switch kind {
	case "npm":
		file, key, text = ".npmrc", "registry", "registry="+at+"/\n"
	case "go":
		file, key, text = ".config/go/env", "GOPROXY", "GOPROXY="+at+"|https://proxy.golang.org,direct\n"
	case "pypi":
		file, key, text = ".config/pip/pip.conf", "index-url", "[global]\nindex-url = "+at+"/simple/\ntrusted-host = "+base.Host+"\n"
	default:
		return "", "", ""
	}
	return filepath.Join(r.cfg.Home, file), key, text
}

func (r *Runner) useCacheFor(ctx context.Context, kind string, base *url.URL) error {
	file, key, text := r.cacheSetting(kind, base)
	switch kind {
	case "apt":
		return r.useAptCache(ctx, base)
	case "docker":
		return r.useDockerCache(ctx, base)
	case "pypi":
		for _, other := range []string{pipFile, filepath.Join(r.cfg.Home, ".pip/pip.conf"), file} {
			// A file may have a section only once, so nothing is added to the user's own.
			if old, err := os.ReadFile(other); err == nil && (hasKey(string(old), key) || other == file) {
				return nil
			}
		}
	}
	return setDefault(file, key, text)
}

// dropCacheFor removes what useCacheFor has written. Docker asks docker.io when its
// mirror does not answer.
func (r *Runner) dropCacheFor(ctx context.Context, kind string, base *url.URL) error {
	if kind == "apt" {
		if _, err := os.Stat(aptCacheFile); err != nil {
			return nil //nolint:nilerr // there is none
		}
		_, err := asRoot(ctx, "rm", "-f", aptCacheFile)
		return err
	}
	file, _, text := r.cacheSetting(kind, base)
	old, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(old), text) {
		return nil //nolint:nilerr // there is no such setting
	}
	left := strings.Replace(string(old), text, "", 1)
	if left == "" {
		return os.Remove(file)
	}
	return replaceFile(file, []byte(left))
}

func replaceFile(file string, text []byte) error {
	tmp := file + ".agentlab-new"
	if err := os.WriteFile(tmp, text, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, file)
}

// maxSettings is the maximum size of a file that setDefault changes.
const maxSettings = 1 << 20

// setDefault adds text to a file of settings, unless the file sets the key.
func setDefault(file, key, text string) error {
	old, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if hasKey(string(old), key) {
		return nil
	}
	if len(old) > maxSettings {
		return fmt.Errorf("%s is too large", file)
	}
	if len(old) > 0 && !bytes.HasSuffix(old, []byte("\n")) {
		text = "\n" + text
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return replaceFile(file, append(old, text...))
}

// hasKey reports whether a file of settings sets a key.
func hasKey(text, key string) bool {
	for line := range strings.Lines(text) {
		name, _, ok := strings.Cut(line, "=")
		if ok && strings.EqualFold(strings.ReplaceAll(strings.TrimSpace(name), "_", "-"), strings.ReplaceAll(key, "_", "-")) {
			return true
		}
	}
	return false
}

// useAptCache makes the cache the proxy for the mirrors that it serves, unless the
// image configures a proxy.
func (r *Runner) useAptCache(ctx context.Context, base *url.URL) error {
	dump, err := exec.CommandContext(ctx, "apt-config", "dump", "Acquire::http::Proxy").Output()
	if errors.Is(err, exec.ErrNotFound) || err == nil && len(bytes.TrimSpace(dump)) > 0 {
		return nil
	}
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, host := range r.resp.Cache.AptHosts {
		if strings.ContainsAny(host, "\"\\;:\n ") {
			return fmt.Errorf("%q is not a host name", host)
		}
		fmt.Fprintf(&text, "Acquire::http::Proxy::%s %q;\n", host, base.String())
	}
	return r.installFile(ctx, aptCacheFile, text.String())
}

// useDockerCache makes the cache the mirror of docker.io, unless the image
// configures one. Docker reloads the setting when it runs.
func (r *Runner) useDockerCache(ctx context.Context, base *url.URL) error {
	if _, err := exec.LookPath("dockerd"); err != nil {
		return nil //nolint:nilerr // there is no Docker
	}
	settings := map[string]any{}
	old, err := os.ReadFile(dockerFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if len(bytes.TrimSpace(old)) > 0 {
		if err := json.Unmarshal(old, &settings); err != nil {
			return fmt.Errorf("%s: %w", dockerFile, err)
		}
	}
	if settings["registry-mirrors"] != nil {
		return nil
	}
	settings["registry-mirrors"] = []string{base.String()}
	insecure, _ := settings["insecure-registries"].([]any)
	settings["insecure-registries"] = append(insecure, base.Host)
	text, err := json.MarshalIndent(settings, "", "  ")
	if err != nil {
		return err
	}
	if err := r.installFile(ctx, dockerFile, string(text)+"\n"); err != nil {
		return err
	}
	if out, err := asRoot(ctx, "systemctl", "reload", "--no-block", "docker.service"); err != nil {
		r.log.Info("Docker does not run yet; it reads its settings when it starts", "err", err, "output", string(bytes.TrimSpace(out)))
	}
	return nil
}

// installFile writes a file of the system.
func (r *Runner) installFile(ctx context.Context, file, text string) error {
	tmp := filepath.Join(string(r.dir), filepath.Base(file))
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		return err
	}
	defer func() { _ = os.Remove(tmp) }()
	if out, err := asRoot(ctx, "install", "-D", "-m", "0644", tmp, file); err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}
