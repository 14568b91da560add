package qemu

import (
	"errors"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
)

func TestSettings(t *testing.T) {
	known := config.Backend{Name: Name, Section: newSettings}
	c, err := config.Parse([]byte("qemu: {accel: tcg, binary: /opt/q}"), known)
	if err != nil || *c.Section(Name).(*Settings) != (Settings{Binary: "/opt/q", Accel: "tcg", Nested: true, TemplateCacheGB: 4}) {
		t.Errorf("%+v, %v", c.Section(Name), err)
	}
	for _, tc := range []struct{ text, field, message, hint string }{
		{"qemu: {accel: hvf}", "qemu.accel", "line 1", "auto, kvm, tcg"},
		{"qemu: {binary: bin/qemu}", "qemu.binary", "absolute", ""},
	} {
		_, err := config.Parse([]byte(tc.text), known)
		e, ok := errors.AsType[*agentlab.Error](err)
		if !ok || e.Code != agentlab.CodeInvalid || e.Field != tc.field || !strings.Contains(e.Message, tc.message) || !strings.Contains(e.Hint, tc.hint) {
			t.Errorf("%s: %+v", tc.text, e)
		}
	}
}
