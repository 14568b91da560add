package config

import (
	"net/url"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// Cache configures the registry cache, through which sandboxes download packages.
type Cache struct {
	Enabled    bool     `yaml:"enabled" doc:"Cache packages of the registries below for all sandboxes whose network policies allow these registries. See docs/cache.md."`
	Dir        string   `yaml:"dir" doctor:"show" doc:"Absolute path of a new directory for the cache alone; empty means registries/ in the cache directory."`
	MaxGB      int      `yaml:"max_gb" doc:"Maximum size of the cache in GiB, 1 to 65536. What was used least recently is deleted first."`
	NPM        string   `yaml:"npm" doctor:"show" doc:"URL of the registry of npm packages; empty means none, here and below."`
	PyPI       string   `yaml:"pypi" doctor:"show" doc:"URL of the simple index of Python packages."`
	PyPIFiles  []string `yaml:"pypi_files" doctor:"show" doc:"Servers of the files of the index, as HOST or HOST:PORT, in addition to its own. Files of other servers are not cached."`
	Go         string   `yaml:"go" doctor:"show" doc:"URL of the proxy of Go modules, through which the checksum database is also used."`
	Apt        []string `yaml:"apt" doctor:"show" doc:"Mirrors of packages of Debian and Ubuntu, as http://HOST. If https://HOST is given, the cache uses TLS where guests ask for http://HOST."`
	Docker     string   `yaml:"docker" doctor:"show" doc:"URL of the registry that is docker.io for guests. Other registries are not cached."`
	DockerAuth string   `yaml:"docker_auth" doctor:"show" doc:"URL of the server from which the cache gets tokens for anonymous downloads."`
}

func defaultCache() Cache {
	return Cache{
		MaxGB: 20, NPM: "https://registry.npmjs.org", PyPI: "https://pypi.org/simple", PyPIFiles: []string{"files.pythonhosted.org"}, Go: "https://proxy.golang.org",
		Apt:    []string{"http://deb.debian.org", "http://security.debian.org", "http://archive.ubuntu.com", "http://security.ubuntu.com", "http://ports.ubuntu.com"},
		Docker: "https://registry-1.docker.io", DockerAuth: "https://auth.docker.io",
	}
}

// validate checks the syntax.
func (c Cache) validate() error {
	bad := func(key, format string, args ...any) *agentlab.Error {
		return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField("cache." + key)
	}
	if c.Dir != "" && !filepath.IsAbs(c.Dir) {
		return bad("dir", "%q is not an absolute path", c.Dir)
	}
	if c.MaxGB < 1 || c.MaxGB > 1<<16 {
		return bad("max_gb", "%d is not between 1 and %d", c.MaxGB, 1<<16)
	}
	for _, u := range []struct{ key, url string }{{"npm", c.NPM}, {"pypi", c.PyPI}, {"go", c.Go}, {"docker", c.Docker}, {"docker_auth", c.DockerAuth}} {
		if u.url == "" {
			continue
		}
		if parsed, err := RegistryURL(u.url); err != nil || parsed.Scheme != "https" {
			return bad(u.key, "%q is not the https URL of a registry", u.url).WithHint("write https://HOST or https://HOST/PATH, without credentials")
		}
	}
	for _, mirror := range c.Apt {
		if u, err := RegistryURL(mirror); err != nil || u.Path != "" {
			return bad("apt", "%q is not the URL of a mirror", mirror).WithHint("write http://HOST or https://HOST")
		}
	}
	for _, host := range c.PyPIFiles {
		if u, err := RegistryURL("https://" + host); err != nil || u.Path != "" {
			return bad("pypi_files", "%q is not HOST or HOST:PORT", host)
		}
	}
	if c.PyPI == "" && len(c.PyPIFiles) > 0 && c.Enabled {
		return bad("pypi_files", "pypi is empty, so these servers are not used").WithHint("set pypi, or pypi_files: []")
	}
	return nil
}

// RegistryURL parses the URL of a registry, and removes a final slash.
func RegistryURL(text string) (*url.URL, error) {
	u, err := url.Parse(strings.TrimSuffix(text, "/"))
	if err != nil {
		return nil, err
	}
	if port := u.Port(); port != "" {
		if n, perr := strconv.ParseUint(port, 10, 16); perr != nil || n == 0 {
			err = strconv.ErrRange
		}
	}
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Hostname() == "" || *u != (url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}) {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not the URL of a registry", text)
	}
	return u, nil
}
