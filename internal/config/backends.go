package config

import (
	"errors"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// Backend describes a driver for config.yaml.
type Backend struct {
	Name string
	// Section returns the defaults of the driver's settings; nil means that it
	// has none.
	Section func() Section
}

// Section is the settings of one backend in config.yaml: a pointer to a struct
// whose fields have yaml and doc tags.
type Section interface {
	// Validate checks the values. It gets the whole configuration, and whether
	// the daemon uses this backend. A Field begins with the name of the driver.
	Validate(c Config, used bool) error
}

// Instance is one backend of a daemon: a driver with settings, under a name.
type Instance struct {
	Name    string
	Driver  string
	Section Section // as the driver gave it; nil if it has none
	key     string  // of the settings in config.yaml
}

// Own reports whether the backend has the name of its driver. Its files are where those of
// the only backend were, before a daemon could have several.
func (i Instance) Own() bool { return i.Name == i.Driver }

// MaxInstances bounds the backends of a daemon.
const MaxInstances = 16

func instance(name string, b Backend) Instance {
	in := Instance{Name: name, Driver: b.Name, key: b.Name}
	if b.Section != nil {
		in.Section = b.Section()
	}
	return in
}

// Instances returns the backends of the daemon, the default first.
func (c Config) Instances() []Instance { return slices.Clone(c.instances) }

// Section returns the settings of the backend with that name, with the type that its driver
// gave them; nil if it has none.
func (c Config) Section(name string) Section {
	for _, in := range c.instances {
		if in.Name == name {
			return in.Section
		}
	}
	return nil
}

// decode stores a document in c. The sections of drivers that no backend uses are checked
// too, so that a mistake is found before the backend is changed.
func (c *Config) decode(doc *strictyaml.Document, drivers []Backend) error {
	own := map[string]Instance{} // settings under the name of the driver
	more := map[string]any{"backends": &struct{}{}}
	for _, d := range drivers {
		own[d.Name] = instance(d.Name, d)
		if s := own[d.Name].Section; s != nil {
			more[d.Name] = s
		}
	}
	named, err := named(doc, drivers, more)
	if err != nil {
		return err
	}
	given := c.Backend
	if len(named) > 0 {
		c.Backend = ""
	}
	if err := doc.DecodeMore(c, more); err != nil {
		return err
	}
	if c.Backend == "" && len(named) > 0 {
		c.Backend = named[0].Name
	} else if c.Backend == "" {
		c.Backend = given
	}
	at := slices.IndexFunc(named, func(in Instance) bool { return in.Name == c.Backend })
	switch in, isDriver := own[c.Backend]; {
	case at >= 0:
		c.instances = slices.Concat([]Instance{named[at]}, named[:at], named[at+1:])
	case isDriver:
		c.instances = slices.Concat([]Instance{in}, named)
	default:
		known := names(named, func(in Instance) string { return in.Name })
		for _, d := range drivers {
			if !slices.Contains(known, d.Name) {
				known = append(known, d.Name)
			}
		}
		return doc.At(OneOf("backend", c.Backend, known))
	}
	for _, in := range own {
		if !slices.ContainsFunc(c.instances, func(x Instance) bool { return x.key == in.key }) {
			if err := in.validate(*c, false); err != nil {
				return doc.At(err)
			}
		}
	}
	return nil
}

// named returns the instances of the key backends, in the order of the file, and adds
// where their settings are stored to more.
func named(doc *strictyaml.Document, drivers []Backend, more map[string]any) (out []Instance, err error) {
	const prefix = "backends."
	known := names(drivers, driverName)
	for _, k := range doc.Keys() {
		name, ok := strings.CutPrefix(k.Path, prefix)
		if !ok || strings.Contains(name, ".") && name != k.Name {
			continue
		}
		if err := agentlab.ValidateName(name); err != nil {
			return nil, doc.At(agentlab.Errorf(agentlab.CodeInvalid, "%q is not a valid name of a backend", name).WithField(k.Path).WithHint("%s", agentlab.HintOf(err)))
		}
		if len(out) == MaxInstances {
			return nil, doc.At(agentlab.Errorf(agentlab.CodeLimit, "there are more than %d backends", MaxInstances).WithField(k.Path))
		}
		driver := doc.Text(k.Path + ".driver")
		if driver == "" {
			return nil, doc.At(agentlab.Errorf(agentlab.CodeInvalid, "the driver of backend %s is missing", name).WithField(k.Path).
				WithHint("add 'driver: NAME'; known: %s", strings.Join(known, ", ")))
		}
		if err := OneOf(k.Path+".driver", driver, known); err != nil {
			return nil, doc.At(err)
		}
		if slices.Contains(known, name) && name != driver {
			return nil, doc.At(agentlab.Errorf(agentlab.CodeInvalid, "the backend %s has the name of a driver, and another driver", name).WithField(k.Path).
				WithHint("give it another name"))
		}
		i := slices.IndexFunc(drivers, func(b Backend) bool { return b.Name == driver })
		in := instance(name, drivers[i])
		in.key = k.Path
		var ignored string
		more[k.Path+".driver"] = &ignored
		if in.Section != nil {
			more[k.Path] = in.Section
		}
		if in.Own() && doc.Line(driver) > 0 {
			return nil, doc.At(agentlab.Errorf(agentlab.CodeInvalid, "the settings of backend %s are given twice", name).WithField(driver).
				WithHint("move them to %s", k.Path))
		}
		out = append(out, in)
	}
	return out, nil
}

func driverName(b Backend) string { return b.Name }

func names[T any](list []T, of func(T) string) []string {
	out := make([]string, len(list))
	for i, v := range list {
		out[i] = of(v)
	}
	return out
}

// validateInstances checks the settings of the backends.
func (c Config) validateInstances() error {
	for _, in := range c.instances {
		if err := in.validate(c, true); err != nil {
			return err
		}
	}
	return nil
}

// validate checks the settings; an error names the key in config.yaml.
func (i Instance) validate(c Config, used bool) error {
	if i.Section == nil {
		return nil
	}
	err := i.Section.Validate(c, used)
	if e, ok := errors.AsType[*agentlab.Error](err); ok && i.key != i.Driver {
		if rest, own := strings.CutPrefix(e.Field, i.Driver+"."); own {
			return e.WithField(i.key + "." + rest)
		}
	}
	return err
}
