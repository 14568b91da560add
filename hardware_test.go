package agentlab

import "testing"

func TestParseCPUList(t *testing.T) {
	for text, want := range map[string]int{"0": 1, "0-7": 8, "0,2,4-6": 5, "1,1,0-1": 2, "4095": 1} {
		if n, err := ParseCPUList(text); n != want || err != nil {
			t.Errorf("%q: %d, %v; want %d", text, n, err, want)
		}
	}
	for _, text := range []string{"", ",", "0-", "-1", "7-0", "0 1", "0,,1", "4096", "+1", "0x1", "a"} {
		if n, err := ParseCPUList(text); CodeOf(err) != CodeInvalid {
			t.Errorf("%q: %d, %v", text, n, err)
		}
	}
}

func TestTemplateVMID(t *testing.T) {
	if n, ok := TemplateVMID(TemplateImage(9000)); n != 9000 || !ok {
		t.Errorf("%d, %v", n, ok)
	}
	for _, name := range []string{"", "base", "template-", "template-x", "template-09", "template-+9", "template--1", "template-99999999999"} {
		if n, ok := TemplateVMID(name); ok {
			t.Errorf("%q is template %d", name, n)
		}
	}
}
