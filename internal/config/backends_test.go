package config

import (
	"errors"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestInstances(t *testing.T) {
	for text, want := range map[string]string{
		"":                               "stage=stage",
		"backend: crowd":                 "crowd=crowd",
		"backends: {a: {driver: stage}}": "a=stage",
		"backends: {b: {driver: crowd}, a: {driver: stage}}":                             "b=crowd a=stage",
		"backend: a\nbackends: {b: {driver: crowd}, a: {driver: stage}}":                 "a=stage b=crowd",
		"backend: stage\nbackends: {b: {driver: crowd}}":                                 "stage=stage b=crowd",
		"backend: stage\nstage: {speed: fast}\nbackends: {b: {driver: stage, speed: x}}": "stage=stage b=stage",
		"backends: {stage: {driver: stage, speed: fast}}":                                "stage=stage",
		"backends:": "stage=stage",
	} {
		c, err := parse(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		var got []string
		for _, in := range c.Instances() {
			got = append(got, in.Name+"="+in.Driver)
		}
		if s := strings.Join(got, " "); s != want || c.Backend != c.Instances()[0].Name {
			t.Errorf("%q: %s, default %s", text, s, c.Backend)
		}
	}
	c, err := parse("backends: {a: {driver: stage, speed: fast, seats: {rows: 2}}, b: {driver: stage}}")
	if err != nil {
		t.Fatal(err)
	}
	a, b := c.Section("a").(*stage), c.Section("b").(*stage)
	if a.Speed != "fast" || a.Seats.Rows != 2 || b.Speed != "slow" || b.Seats.Rows != 0 || c.Section("stage") != nil {
		t.Errorf("%+v, %+v", a, b)
	}
}

func TestInstancesRefused(t *testing.T) {
	for text, want := range map[string]string{
		"backends: {a: {speed: fast}}":                          "line 1: the driver of backend a is missing",
		"backends: {a: {driver: none}}":                         `line 1: "none" is not known`,
		"backends: {a: }":                                       "line 1: the driver of backend a is missing",
		"backends: {A: {driver: stage}}":                        `line 1: "A" is not a valid name`,
		"backends: {crowd: {driver: stage}}":                    "line 1: the backend crowd has the name of a driver, and another driver",
		"backends:\n  a: {driver: stage, sped: x}":              "line 2: unknown key",
		"backends:\n  a:\n    driver: stage\n    speed: ''":     "line 4: missing",
		"backends:\n  b: {driver: crowd, speed: x}":             "line 2: unknown key",
		"stage: {speed: x}\nbackends: {stage: {driver: stage}}": "line 1: the settings of backend stage are given twice",
		"backend: c\nbackends: {a: {driver: stage}}":            `line 1: "c" is not known`,
		"backends: [a]":                                         "line 1: a mapping",
		"backends: {a: stage}":                                  "line 1: the driver of backend a is missing",
	} {
		_, err := parse(text)
		if e, ok := errors.AsType[*agentlab.Error](err); !ok || e.Code != agentlab.CodeInvalid || !strings.Contains(e.Message, want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
